"""One place with checkpoints.

Read ``checkpoint_store`` first, then ``catalog`` (what is committed). ``writer_lock`` tells live
writers from dead ones, ``cleanup`` applies retention, ``condition_reports`` tells the coordinator,
and ``tiers`` makes one list of two places.
"""
