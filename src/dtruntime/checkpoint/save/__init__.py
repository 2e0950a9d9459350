"""A save: staged in host memory, written as a pack in the background, committed.

Read ``commit`` first; ``handle`` is what the caller gets.
"""
