"""Loads committed checkpoints, and checks every chunk.

Read ``checkpoint_loader`` first (which checkpoint), then ``pack_reader`` (its bytes);
``array_slices`` reads boxes of arrays, ``verify`` everything.
"""
