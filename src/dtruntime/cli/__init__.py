"""The ``strata`` command; read ``main`` first, then a command in ``commands``.

``invocation`` has what commands share. ``*_report`` is what a command found, in the shape that
``--json`` prints, ``*_view`` the same for people; ``status_watch`` is the live screen, and
``checks`` what ``strata doctor`` looks at.
"""
