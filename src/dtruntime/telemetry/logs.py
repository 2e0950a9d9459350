"""Structured logging.

A log record is an event name plus fields: ``log.info("worker.registered", rank=3)``. Its message
has both; a custom formatter finds them as ``record.event`` and ``record.fields``. The level comes
from ``STRATA_LOG`` (or its old name ``RUST_LOG``); ``STRATA_LOG_FORMAT=json`` writes a JSON object
per line.

A program that sets up Python's logging gets the records like those of any library. Otherwise they
go to stderr; without ``STRATA_LOG``, only warnings and errors do.
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


class _Tail:
    """Fields as text, formatted only if the record is written."""

    __slots__ = ("_fields",)

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __str__(self) -> str:
        return "".join(f" {key}={_short(value)}" for key, value in self._fields.items())


class EventLog:
    """A logger that takes an event name and fields."""

    __slots__ = ("_logger",)

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"{ROOT}.{name}")

    def _write(self, level: int, event: str, fields: dict[str, Any]) -> None:
        if self._logger.isEnabledFor(level):
            extra = {"event": event, "fields": fields}
            self._logger.log(level, "%s%s", event, _Tail(fields), extra=extra, stacklevel=3)

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

    Of the old form ``coordinator=debug,info`` the part without a target counts.
    """
    return _LEVELS.get(_level_name(), logging.INFO)


def is_debugging() -> bool:
    """Whether everything is to be shown, including what concerns only Strata's own code."""
    return level_from_environment() <= logging.DEBUG


def _level_name() -> str:
    plain = [part for part in (_level_setting() or "info").lower().split(",") if "=" not in part]
    return plain[-1].strip() if plain else "info"


def _level_setting() -> str:
    return os.environ.get("STRATA_LOG") or os.environ.get("RUST_LOG") or ""


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{stamp}.{int(record.msecs):03d} {record.levelname:<7} {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        own: dict[str, Any] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": getattr(record, "event", "") or record.getMessage(),
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
    """Send Strata's log to ``stream``, stderr by default; without ``STRATA_LOG`` from ``info`` on.

    For command-line programs, and programs that want to see normal events too. Python's root logger
    then gets nothing.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_formatter())
    logger = logging.getLogger(ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel(level_from_environment())
    logger.propagate = False
    if _level_name() not in _LEVELS:
        EventLog("telemetry").warning(
            "log.level_unknown", asked=_level_setting(), known=", ".join(_LEVELS)
        )


def _formatter() -> logging.Formatter:
    as_json = os.environ.get("STRATA_LOG_FORMAT", "").lower() == "json"
    return _JsonFormatter() if as_json else _TextFormatter()


class _LastResort(logging.Handler):
    """Writes to stderr unless the program has set up logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.setFormatter(_formatter())
            print(self.format(record), file=sys.stderr)


def _set_up_library() -> None:
    logger = logging.getLogger(ROOT)
    logger.addHandler(_LastResort())
    if _level_setting():
        logger.setLevel(level_from_environment())


_set_up_library()
