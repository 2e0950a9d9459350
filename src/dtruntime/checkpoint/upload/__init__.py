"""Copies committed checkpoints from the local tier to the main storage.

Read ``uploader`` first.
"""
