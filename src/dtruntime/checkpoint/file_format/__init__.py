"""What the files of a checkpoint say.

A part is what one rank saved: a stream of bytes cut into chunks, which lie in packs; the manifest
names the parts. Read `manifest` first.
"""
