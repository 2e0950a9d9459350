"""Loaders: batches of registered or indexed samples for any loop."""

from .live import LiveLoader
from .loader import Loader
from .mixture import Mixture
from .source import FileSource, NumberSource, Source
from .state import merge_states

__all__ = [
    "FileSource",
    "LiveLoader",
    "Loader",
    "Mixture",
    "NumberSource",
    "Source",
    "merge_states",
]
