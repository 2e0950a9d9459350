"""One module for each command, named after it; read ``status`` first."""
