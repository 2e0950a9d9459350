"""Where restored arrays go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from ...telemetry import EventLog

log = EventLog("checkpoint.state_dict")

MapLocation: TypeAlias = "str | Mapping[str, Any] | Any | None"
"""None, a device or its name, or a mapping from the devices of saved arrays to such."""


class Places:
    """The devices of one restoration."""

    def __init__(self, map_location: MapLocation) -> None:
        self._chosen = map_location
        self._known: dict[tuple[str, str], str] = {}

    def of(self, device: str, library: str, home: Any) -> str:
        """Where arrays go that were on a device."""
        known = self._known.get((library, device))
        if known is None:
            known = self._known[library, device] = self._find(device, library, home)
        return known

    def _find(self, device: str, library: str, home: Any) -> str:
        chosen = self._chosen
        if isinstance(chosen, Mapping):
            chosen = chosen.get(device)
        if chosen is not None:
            name = str(chosen)
            if not home.available(name):
                raise ValueError(
                    f"map_location asks for {name}, which {library} does not have here"
                )
            return name
        if home.available(device):
            return device
        log.warning("checkpoint.device_missing", library=library, device=device, restored_on="cpu")
        return "cpu"
