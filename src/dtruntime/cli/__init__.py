"""The ``strata`` command; read ``main`` first, then the module of a command.

Each command has an `add_parser`, which declares its options, and functions that run it and return
the exit code. ``invocation`` has what commands share. ``*_report`` is what a command read, in the
shape that ``--json`` prints; ``doctor_checks`` is what ``strata doctor`` looks at.
"""
