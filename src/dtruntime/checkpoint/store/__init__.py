"""One place with checkpoints. Read ``checkpoint_store`` first.

Which are committed (``catalog``), who writes (``writer_lock``), what goes (``cleanup``), what the
coordinator is told (``condition_reports``), and places in two ``tiers``.
"""
