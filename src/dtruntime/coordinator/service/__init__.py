"""The coordinator's service: limits, validation and metrics around the state machine."""

from .core import Clock, CoordinatorService

__all__ = ["Clock", "CoordinatorService"]
