"""The dashboard, as it is built: files that the coordinator serves and browsers run."""

from pathlib import Path


def static_folder() -> Path:
    """Where the built dashboard lies; nothing is there before ``make dashboard``."""
    return Path(__file__).parent / "static"
