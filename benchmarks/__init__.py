"""Measurements of Strata against what it replaces and what the hardware allows."""
