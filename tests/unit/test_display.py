import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dtruntime.display import count, duration, json_text, open_console, plain, size

OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
ATTACK = "a\x1b]0;title\x07\x1b[2J\x9b31mred\x08\r\u202egnp.exe"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 µs"),
        (0.0000123, "12.3 µs"),
        (0.00012, "120 µs"),
        (0.00099999, "1.0 ms"),
        (0.0018, "1.8 ms"),
        (0.123, "123 ms"),
        (0.99999, "1.0 s"),
        (4.24, "4.2 s"),
        (59.94, "59.9 s"),
        (60.0, "1 m 00 s"),
        (192.9, "3 m 12 s"),
        (3600.0, "1 h 00 m"),
        (7500.0, "2 h 05 m"),
        (86400 * 3 + 3600 * 4, "3 d 4 h"),
        (-0.25, "-250 ms"),
    ],
)
def test_duration_is_short_and_has_its_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_count_and_size_read_like_prose() -> None:
    assert count(1, "barrier") == "1 barrier"
    assert count(0, "worker") == "0 workers"
    assert count(12_345, "worker") == "12,345 workers"
    assert size(159_532) == "159.5 kB"


def test_what_a_terminal_obeys_is_shown_instead(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(ATTACK)
    table.add_row(ATTACK)
    table.add_row(Text(ATTACK, "bold"))
    console = open_console(colour=False)
    console.print(ATTACK, Text(ATTACK), markup=False)
    console.print(Group(table, Panel(ATTACK, title=ATTACK)))
    printed = capsys.readouterr().out
    assert not OBEYED.search(printed)
    assert r"\x1b[2J" in printed
    assert r"\u202egnp.exe" in printed


def test_styles_are_still_styles(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    open_console().print(Text(f"good {ATTACK}", "green"))
    printed = capsys.readouterr().out
    assert re.match("\x1b\\[32mgood ", printed)
    assert "\x1b]" not in printed
    assert "\x1b[2J" not in printed


@given(st.text())
def test_plain_text_has_nothing_that_is_obeyed_and_loses_nothing(text: str) -> None:
    assert not OBEYED.search(plain(text))
    assert json.loads(json_text({"t": text}))["t"] == text
    assert not OBEYED.search(json_text({"t": text}, indent=False))
    if text.isprintable():
        assert plain(text) == text
