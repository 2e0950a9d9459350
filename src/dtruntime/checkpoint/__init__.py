"""Checkpoints: saved without stalling training, committed whole, checked when loaded."""
