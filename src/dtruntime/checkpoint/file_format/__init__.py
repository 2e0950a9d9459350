"""What the files of a checkpoint say.

Read ``manifest`` first. A part is what one rank saved: a stream of bytes that is cut into chunks
(``chunking``), which are encoded (``chunks``) and lie in packs; those of earlier checkpoints are
found by ``chunk_index``.
"""
