"""Values on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def whole_between(least: int, most: int) -> Callable[[str], int]:
    """Reads a whole number within bounds."""

    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be between {least} and {most}, not {value}")
        return value

    return number
