"""The coordinator process: a pure state machine behind a gRPC service and a durable store.

Read ``service`` first: it turns calls into commands for the machine in ``state``, and answers when
``store`` has what they changed. ``transport`` is the gRPC server, ``http`` the API and dashboard,
``server`` the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import _lazy

if TYPE_CHECKING:
    from .service import CoordinatorService as CoordinatorService
else:
    __getattr__, __dir__, __all__ = _lazy.exports(
        __name__,
        {
            ".service": "CoordinatorService",
        },
    )
