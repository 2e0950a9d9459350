"""The states of random number generators, of those libraries that the process uses."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import numpy as np

from ..sharding.hashing import fold


def capture() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's global generators, of torch also on GPUs."""
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": json.dumps([version, list(numbers), gauss]),
        "numpy": _numpy_state(),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        states["torch"] = torch.get_rng_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore(states: dict[str, Any]) -> None:
    """Put the generators into the states that `capture` found."""
    version, numbers, gauss = json.loads(states["python"])
    random.setstate((version, tuple(numbers), gauss))
    kept = states["numpy"]
    inner = {"key": kept["key"], "pos": int(kept["pos"])}
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": inner,
            "has_gauss": int(kept["has_gauss"]),
            "gauss": float(kept["gauss"]),
        }
    )
    torch = sys.modules.get("torch")
    if torch is not None and "torch" in states:
        torch.set_rng_state(states["torch"].cpu())
        if "cuda" in states and torch.cuda.is_available():
            available = states["cuda"][: torch.cuda.device_count()]
            torch.cuda.set_rng_state_all([state.cpu() for state in available])


def seed(*key: int) -> None:
    """Seed all generators, for a worker that has no states of its own to go on with."""
    number = fold(*key)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(number & 0x7FFFFFFFFFFFFFFF)


def _numpy_state() -> dict[str, Any]:
    state: Any = np.random.get_state(legacy=False)
    return {
        "key": state["state"]["key"],
        "pos": state["state"]["pos"],
        "has_gauss": state["has_gauss"],
        "gauss": state["gauss"],
    }
