"""Training loops of other libraries: ``lightning`` and ``transformers``.

Read ``worker_session`` first: a trainer's membership in a job, which both callbacks share.
"""
