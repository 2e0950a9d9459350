"""Local_disk."""
