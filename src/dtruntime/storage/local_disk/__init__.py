"""Files of this machine: the backend, atomic files, direct I/O.

Read ``local_backend`` first.
"""
