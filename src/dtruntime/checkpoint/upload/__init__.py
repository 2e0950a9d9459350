"""Upload."""
