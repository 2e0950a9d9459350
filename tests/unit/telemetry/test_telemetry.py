"""Structured logging, and histograms that can be trusted."""

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from dtruntime.telemetry import (
    ROOT,
    EventLog,
    Histogram,
    configure_logging,
    level_from_environment,
)
from dtruntime.telemetry.histogram import NEWEST_KEPT


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    logger = logging.getLogger(ROOT)
    before = logger.handlers[:], logger.level, logger.propagate
    yield io.StringIO()
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.mark.parametrize("variable", ["STRATA_LOG", "RUST_LOG"])
@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("trace", logging.DEBUG),
        ("debug", logging.DEBUG),
        ("info", logging.INFO),
        ("WARN", logging.WARNING),
        ("warning", logging.WARNING),
        ("error", logging.ERROR),
        ("off", logging.CRITICAL + 1),
        ("coordinator=debug,warn", logging.WARNING),
        ("warn,coordinator=debug", logging.WARNING),
        ("coordinator=debug", logging.INFO),
        ("nonsense", logging.INFO),
        ("", logging.INFO),
    ],
)
def test_level_is_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, level: int
) -> None:
    monkeypatch.setenv(variable, text)
    assert level_from_environment() == level


def test_new_variable_beats_the_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUST_LOG", "debug")
    monkeypatch.setenv("STRATA_LOG", "error")
    assert level_from_environment() == logging.ERROR


def test_text_line_is_the_event_and_its_fields(stream: io.StringIO) -> None:
    configure_logging(stream)
    EventLog("test").warning("worker.dead", rank=3, age=1.23456, reason="no heartbeat", empty="")
    line = stream.getvalue().strip()
    assert line.endswith('WARNING worker.dead rank=3 age=1.235 reason="no heartbeat" empty=""')


def test_line_break_in_a_field_stays_on_its_line(stream: io.StringIO) -> None:
    configure_logging(stream)
    EventLog("test").info("event", text="a\nb", path="a=b")
    assert len(stream.getvalue().splitlines()) == 1


def test_json_line_has_everything(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_LOG_FORMAT", "json")
    configure_logging(stream)
    EventLog("test").error("call.failed", error=ValueError("x"), count=2)
    entry = json.loads(stream.getvalue())
    assert (entry["event"], entry["level"], entry["logger"]) == (
        "call.failed",
        "error",
        "strata.test",
    )
    assert (entry["count"], entry["error"]) == (2, "x")


def test_field_cannot_pose_as_the_event(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_LOG_FORMAT", "json")
    configure_logging(stream)
    EventLog("test").info("real", level="fake", logger="fake", at="fake")
    entry = json.loads(stream.getvalue())
    assert (entry["event"], entry["level"], entry["logger"]) == ("real", "info", "strata.test")


def test_level_is_respected(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_LOG", "warn")
    configure_logging(stream)
    log = EventLog("test")
    log.debug("one")
    log.info("two")
    log.warning("three")
    assert [line.split()[-1] for line in stream.getvalue().splitlines()] == ["three"]


def test_exception_is_shown_below_its_line(stream: io.StringIO) -> None:
    configure_logging(stream)
    try:
        raise ValueError("inner")
    except ValueError:
        logging.getLogger(f"{ROOT}.test").exception("call.failed")
    assert "ValueError: inner" in stream.getvalue()


def test_without_configuration_records_go_to_the_users_own_logging(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger=ROOT):
        EventLog("test").info("worker.registered", rank=3)
    (record,) = caplog.records
    assert record.getMessage() == "worker.registered rank=3"
    assert (record.event, record.fields) == ("worker.registered", {"rank": 3})  # type: ignore[attr-defined]


PROGRAM = """
import logging, sys
from dtruntime.telemetry import EventLog
if "own" in sys.argv:
    logging.basicConfig(format="own: %(name)s %(message)s")
log = EventLog("test")
log.info("worker.registered", rank=3)
log.warning("worker.dead", rank=4)
"""


@pytest.mark.parametrize(
    ("asked", "arguments", "lines"),
    [
        ("", [], ["WARNING worker.dead rank=4"]),
        ("debug", [], ["INFO    worker.registered rank=3", "WARNING worker.dead rank=4"]),
        ("off", [], []),
        ("", ["own"], ["own: strata.test worker.dead rank=4"]),
        (
            "info",
            ["own"],
            [
                "own: strata.test worker.registered rank=3",
                "own: strata.test worker.dead rank=4",
            ],
        ),
    ],
)
def test_program_that_does_nothing_about_it_sees_what_needs_a_look(
    asked: str, arguments: list[str], lines: list[str]
) -> None:
    env = {**os.environ, "STRATA_LOG": asked, "RUST_LOG": ""}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    written = done.stderr.splitlines()
    assert len(written) == len(lines)
    assert all(line.endswith(end) for line, end in zip(written, lines, strict=True))


def test_unknown_level_is_named(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_LOG", "verbose")
    configure_logging(stream)
    assert "log.level_unknown asked=verbose" in stream.getvalue()


def test_quantiles_lie_where_the_values_do() -> None:
    histogram = Histogram()
    for value in range(1, 1001):
        histogram.observe(value / 1000)
    assert histogram.count == 1000
    assert histogram.total == pytest.approx(500.5)
    assert histogram.quantile(0.5) == 0.5
    assert histogram.quantile(0.99) == 0.99
    assert histogram.quantile(0.0) == histogram.quantile(0.001) == 0.001
    assert histogram.quantile(1.0) == 1.0


def test_every_quantile_of_one_value_is_that_value() -> None:
    histogram = Histogram()
    histogram.observe(3.21)
    assert histogram.quantile(0.5) == histogram.quantile(0.99) == 3.21


def test_quantiles_are_of_the_newest_values() -> None:
    histogram = Histogram()
    for value in (5.0, *[1.0] * NEWEST_KEPT):
        histogram.observe(value)
    assert histogram.quantile(1.0) == 1.0
    assert histogram.count == NEWEST_KEPT + 1


def test_quantile_of_nothing_is_zero() -> None:
    assert Histogram().quantile(0.99) == 0.0


def test_value_above_the_last_bound_counts_as_it_is() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(1e9)
    assert histogram.counts == [0, 0, 1]
    assert histogram.quantile(0.5) == 1e9


def test_value_on_a_bound_belongs_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 0]
