"""Checkpoints of a job: attempts and their parts, commits, history. Read ``commits`` first."""
