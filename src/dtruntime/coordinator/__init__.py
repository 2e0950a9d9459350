"""The coordinator process: a pure state machine behind a gRPC service and a durable store.

Read ``service`` first: it takes calls to the machine in ``state``, and answers when ``store`` has
what they changed. ``transport`` is gRPC, ``http`` the dashboard's side, ``server`` the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .service import CoordinatorService

__all__ = ["CoordinatorService"]


def __getattr__(name: str) -> Any:
    if name == "CoordinatorService":
        from .service import CoordinatorService

        return CoordinatorService
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
