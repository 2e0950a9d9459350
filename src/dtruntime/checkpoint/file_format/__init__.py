"""The files of a checkpoint.

Read ``manifest`` first. A part is what one rank saved: a stream of bytes, cut into chunks that are
encoded and stored in packs (``chunks``).
"""
