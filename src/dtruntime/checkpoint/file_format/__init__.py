"""File_format."""
