"""One place with checkpoints.

Read ``checkpoint_store`` first (what is opened, and retention), then ``catalog`` (what is
committed). ``writer_lock`` tells live writers from dead ones.
"""
