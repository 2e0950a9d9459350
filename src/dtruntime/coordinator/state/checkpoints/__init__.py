"""Attempts, pending parts, commits, history of checkpoints. Read ``commits`` first."""
