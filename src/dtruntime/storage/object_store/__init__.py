"""Object_store."""
