"""The pure state machine: commands in, replies and effects out. Read ``machine`` first.

- *rank*: a worker's place in a job; *slot*: the same place in the assignment of shards
- *incarnation*: one registration of a worker; *generation*: one membership of the job
- *held call*: a call whose answer waits for other members; a `Release` effect answers it
- *attempt*: one try of all ranks at saving a step; *part*: what one rank sends of it
- *ledger*: who reads what of an epoch; *segment*: a stretch of it with the same readers;
  *lane*: the samples of one slot in a segment
"""

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
