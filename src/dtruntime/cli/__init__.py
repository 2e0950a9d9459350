"""The ``strata`` command."""
