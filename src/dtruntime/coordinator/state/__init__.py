"""The pure state machine: commands in, replies and effects out. Read ``machine`` first."""

from .commands import HELD, Refused, Reply
from .effects import Delete, DeleteJob, Effect, Emit, Put, Release
from .machine import Job, Machine
from .records import RECORD_TYPES, Event, Record

__all__ = [
    "HELD",
    "RECORD_TYPES",
    "Delete",
    "DeleteJob",
    "Effect",
    "Emit",
    "Event",
    "Job",
    "Machine",
    "Put",
    "Record",
    "Refused",
    "Release",
    "Reply",
]
