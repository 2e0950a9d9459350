"""Who is measured, and in which part."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from .base import Contender, Kind, Task

__all__ = ["ENTRIES", "Contender", "Entry", "Kind", "Task", "entry", "of_part"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender before its libraries are imported."""

    name: str
    kind: Kind
    place: str
    """The module here, and the class in it."""
    parts: tuple[str, ...]

    def make(self, task: Task) -> Contender:
        """Import and make it."""
        module, _, cls = self.place.partition(".")
        made: Contender = getattr(import_module(f".{module}", __name__), cls)(task)
        return made


ENTRIES = (
    Entry("Strata, bytes", Kind.STRATA, "strata.StrataBytes", ("local", "memory", "s3")),
    Entry(
        "Strata, tensors", Kind.STRATA, "strata.StrataTensors", ("local", "load", "memory", "s3")
    ),
    Entry("torch.save + fsync", Kind.PEER, "pytorch.TorchSave", ("local", "memory")),
    Entry("safetensors + fsync", Kind.PEER, "pytorch.Safetensors", ("local", "memory")),
    Entry("dcp.save", Kind.PEER, "pytorch.DcpSave", ("local", "memory")),
    Entry("dcp.async_save", Kind.PEER, "pytorch.DcpAsync", ("local", "memory")),
    Entry("dcp.async_save, kept copy", Kind.PEER, "pytorch.DcpAsyncCached", ("local", "memory")),
    Entry("torch.load", Kind.PEER, "pytorch.TorchSave", ("load",)),
    Entry("safetensors load_file", Kind.PEER, "pytorch.Safetensors", ("load",)),
    Entry("dcp.load", Kind.PEER, "pytorch.DcpSave", ("load",)),
    Entry("memcpy", Kind.LIMIT, "limits.Memcpy", ("local",)),
    Entry("write + fsync", Kind.LIMIT, "limits.PlainWrite", ("local",)),
    Entry("direct pwrite + fsync", Kind.LIMIT, "limits.DirectWrite", ("local",)),
    Entry("read, new memory", Kind.LIMIT, "limits.ReadNew", ("load",)),
    Entry("read, used memory", Kind.LIMIT, "limits.ReadAgain", ("load",)),
    Entry("raw obstore", Kind.LIMIT, "objects.RawObstore", ("s3",)),
    Entry("raw obstore, again", Kind.LIMIT, "objects.RawObstore", ("s3",)),
    Entry("boto3", Kind.PEER, "objects.Boto", ("s3",)),
)


def of_part(part: str) -> list[Entry]:
    """Who is measured in a part."""
    return [entry for entry in ENTRIES if part in entry.parts]


def entry(name: str) -> Entry:
    """A contender by its name."""
    return next(entry for entry in ENTRIES if entry.name == name)
