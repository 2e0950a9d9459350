"""Files of this machine: `LocalBackend`, atomic files, direct I/O.

Read `local_backend` first.
"""
