"""What a person sees."""

import io

import msgspec
import pytest
from rich.console import Console, RenderableType

from dtruntime.bench.report import MachineInfo, Section, Series, describe, results
from dtruntime.bench.tables import machine_view, section_view, skipped_view


def text_of(view: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def machine() -> MachineInfo:
    return describe()


def test_busy_machine_is_warned_of(machine: MachineInfo) -> None:
    idle = msgspec.structs.replace(machine, load_average=[0.0, 0.0, 0.0], busy=False)
    busy = msgspec.structs.replace(machine, load_average=[7.5, 0.0, 0.0], busy=True)
    assert "busy" not in text_of(machine_view(idle))
    assert "the machine is busy (load average 7.5" in text_of(machine_view(busy))


def test_table_has_times_rates_and_ratios() -> None:
    limit = Series("write raw", "bytes", bytes_each=1)
    ours = Series("save bytes: durable", "bytes", "write raw", bytes_each=1)
    stall = Series("save bytes: stall", "bytes", bytes_each=1)
    limit.add(1.0, 10**9)
    ours.add(1.25, 10**9)
    stall.add(0.0005)
    facts: dict[str, str | int | float] = {
        "size_bytes": 10**9,
        "rounds": 1,
        "raw_write": "directly",
        "raw_read": "at once",
    }
    section = Section("checkpoints", "/data", facts, results([limit, ours, stall]), ["a note"])

    lines = [" ".join(line.split()) for line in text_of(section_view(section)).splitlines()]

    assert lines[1] == "checkpoints /data 1.0 GB 1 round"
    assert lines[3] == "write raw 1.0 s 1.0 s 1.0 s 1.0 GB/s"
    assert lines[4] == "save bytes: durable 1.2 s 1.2 s 1.2 s 800.0 MB/s 80%"
    assert lines[5] == "save bytes: stall 500 µs 500 µs 500 µs"
    assert lines[6:] == ["write raw: directly", "read raw: at once", "a note"]


def test_part_that_was_not_measured_says_why() -> None:
    assert "data not measured: no pyarrow" in text_of(skipped_view("data", "no pyarrow"))
