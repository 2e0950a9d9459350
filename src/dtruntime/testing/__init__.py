"""Tools for testing programs that use Strata: real processes, started and killed."""

from .cluster import LocalCoordinator

__all__ = ["LocalCoordinator"]
