"""Callbacks for the training loops of other libraries: ``lightning`` and ``transformers``.

Read ``worker_session`` first: the membership in a job that both callbacks share.
"""
