"""Loaders: batches of registered or indexed samples for any loop."""

from ..live_loader import LiveLoader
from ..loader import Loader
from ..loader_state import merge_states
from ..mixture import Mixture
from ..source import FileSource, NumberSource, Source

__all__ = [
    "FileSource",
    "LiveLoader",
    "Loader",
    "Mixture",
    "NumberSource",
    "Source",
    "merge_states",
]
