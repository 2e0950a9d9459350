"""Who is measured, and in which part."""

from __future__ import annotations

from ...harness import Entry, Kind

_SAVES = ("local", "memory")
_SMALL = (*_SAVES, "small-tensors")
ENTRIES = (
    Entry("Strata, bytes", Kind.STRATA, "strata:StrataBytes", (*_SAVES, "s3")),
    Entry("Strata, tensors", Kind.STRATA, "strata:StrataTensors", (*_SMALL, "load", "s3")),
    Entry("torch.save + fsync", Kind.PEER, "pytorch:TorchSave", _SMALL),
    Entry("safetensors + fsync", Kind.PEER, "pytorch:Safetensors", _SMALL),
    Entry("dcp.save", Kind.PEER, "pytorch:DcpSave", _SMALL),
    Entry("dcp.async_save", Kind.PEER, "pytorch:DcpAsync", _SAVES),
    Entry(
        "dcp.async_save, kept copy",
        Kind.PEER,
        "pytorch:DcpAsync",
        _SAVES,
        options={"keeps_copy": True},
    ),
    Entry("torch.load", Kind.PEER, "pytorch:TorchSave", ("load",)),
    Entry("safetensors load_file", Kind.PEER, "pytorch:Safetensors", ("load",)),
    Entry("dcp.load", Kind.PEER, "pytorch:DcpSave", ("load",)),
    Entry("memcpy", Kind.LIMIT, "limits:Memcpy", ("local",)),
    Entry("write + fsync", Kind.LIMIT, "limits:Write", ("local",), options={"direct": False}),
    Entry("direct pwrite + fsync", Kind.LIMIT, "limits:Write", ("local",)),
    Entry("read, new memory", Kind.LIMIT, "limits:Read", ("load",)),
    Entry("read, used memory", Kind.LIMIT, "limits:Read", ("load",), options={"is_new": False}),
    Entry("raw obstore", Kind.LIMIT, "objects:RawObstore", ("s3",)),
    Entry("raw obstore, again", Kind.LIMIT, "objects:RawObstore", ("s3",)),
    Entry("boto3", Kind.PEER, "objects:Boto", ("s3",)),
)


def of_part(part: str) -> list[Entry]:
    """Who is measured in a part."""
    return [entry for entry in ENTRIES if part in entry.parts]
