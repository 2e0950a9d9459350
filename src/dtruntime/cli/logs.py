"""The library's log in commands that show their findings themselves."""

from __future__ import annotations

import logging
import os

from ..telemetry import ROOT, configure_logging


def log_only_when_asked() -> None:
    """Write the log when ``STRATA_LOG`` (or ``RUST_LOG``) is set, else nothing."""
    if os.environ.get("STRATA_LOG") or os.environ.get("RUST_LOG"):
        configure_logging()
    else:
        logging.getLogger(ROOT).handlers[:] = [logging.NullHandler()]
