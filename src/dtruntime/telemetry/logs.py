"""Structured logging.

A log record is an event name plus fields: ``log.info("worker.registered", rank=3)``.
The level comes from ``STRATA_LOG`` (or its old name ``RUST_LOG``), ``info`` by default;
``STRATA_LOG_FORMAT=json`` writes one JSON object per line.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Any, TextIO

ROOT = "strata"
_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}


class EventLog:
    """A logger that takes an event name and fields."""

    __slots__ = ("_logger",)

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"{ROOT}.{name}")

    def _write(self, level: int, event: str, fields: dict[str, Any]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={"fields": fields}, stacklevel=3)

    def debug(self, event: str, **fields: Any) -> None:
        """Log detail for someone following one problem."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        """Log something normal that an operator wants to see."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Log something that works but needs a look."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        """Log something that failed."""
        self._write(logging.ERROR, event, fields)


def level_from_environment() -> int:
    """The level that ``STRATA_LOG`` or ``RUST_LOG`` asks for.

    Both ``debug`` and the old form ``coordinator=debug,info`` are read; of the latter the
    part without a target counts.
    """
    wanted = os.environ.get("STRATA_LOG") or os.environ.get("RUST_LOG") or "info"
    plain = [part for part in wanted.lower().split(",") if "=" not in part]
    return _LEVELS.get(plain[-1].strip() if plain else "info", logging.INFO)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = getattr(record, "fields", {})
        tail = "".join(f" {key}={_short(value)}" for key, value in fields.items())
        line = f"{stamp}.{int(record.msecs):03d} {record.levelname:<7} {record.getMessage()}{tail}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        own: dict[str, Any] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        entry = {**own, **getattr(record, "fields", {}), **own}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    plain = text and " " not in text and text.isprintable()
    return text if plain else json.dumps(text)


def configure_logging(stream: TextIO | None = None) -> None:
    """Send Strata's log to ``stream`` (stderr by default), as the environment asks.

    Command-line programs call this. A library user's own logging setup is left alone:
    without a call, records go to Python's root logger as any library's do.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    as_json = os.environ.get("STRATA_LOG_FORMAT", "").lower() == "json"
    handler.setFormatter(_JsonFormatter() if as_json else _TextFormatter())
    logger = logging.getLogger(ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel(level_from_environment())
    logger.propagate = False
