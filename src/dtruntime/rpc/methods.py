"""The service's methods, read from the generated descriptor."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from .gen import coordinator_pb2 as pb

_SERVICE = pb.DESCRIPTOR.services_by_name["CoordinatorService"]

SERVICE = _SERVICE.full_name


@dataclass(frozen=True, slots=True)
class Method:
    """One remote method."""

    name: str
    request: type[Message]
    reply: type[Message]
    streams: bool

    @property
    def path(self) -> str:
        """Its HTTP/2 path."""
        return f"/{SERVICE}/{self.name}"


METHODS: dict[str, Method] = {
    m.name: Method(
        m.name, GetMessageClass(m.input_type), GetMessageClass(m.output_type), m.server_streaming
    )
    for m in _SERVICE.methods
}
