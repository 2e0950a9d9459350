"""One module for each command, named after it; read ``status`` first.

`add_parser` declares the command's options, ``run`` does it and returns the exit code.
"""
