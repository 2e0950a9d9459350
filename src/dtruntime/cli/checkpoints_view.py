"""Checkpoints as a person reads them."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..display import count, duration, size
from .checkpoints_report import (
    CheckpointList,
    ListedCheckpoint,
    Removal,
    ShownArray,
    ShownCheckpoint,
    ShownPack,
    Verification,
    VerifiedCheckpoint,
)

_WORDS = {"id", "kind", "file", "key", "dtype", "shape", "verdict", "written for", "also for"}


def list_view(report: CheckpointList, now: float | None = None) -> RenderableType:
    """One line for each checkpoint."""
    table = _table("step", "epoch", "id", "size", "stored", "kind", "parts", "age", "")
    for one in report.checkpoints:
        table.add_row(*_line(one, time.time() if now is None else now))
    return Group(table, Text(), _usage(report))


def show_view(report: ShownCheckpoint, arrays_shown: int | None) -> RenderableType:
    """Everything about a checkpoint; ``arrays_shown`` limits the arrays, None shows all."""
    one = report.checkpoint
    head = Text.assemble((f"step {one.step}", "bold"), f", checkpoint {one.checkpoint_id}")
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in _facts(report):
        facts.add_row(Text(f"  {name}"), Text(value))
    parts: list[RenderableType] = [head, facts, Text(), _packs(report.packs, one.step)]
    if report.arrays:
        parts += [Text(), *_arrays(report.arrays, arrays_shown, one.parts > 1)]
    return Group(*parts)


def verify_view(report: Verification) -> RenderableType:
    """Which checkpoints are good, and what is wrong with the others."""
    table = _table("step", "id", "chunks", "verdict")
    for one in report.checkpoints:
        verdict = Text("good", "green") if one.good else Text("DAMAGED", "bold red")
        table.add_row(str(one.step), one.checkpoint_id or "?", f"{one.chunks:,}", verdict)
    lines = [line for one in report.checkpoints for line in _damages(one)]
    good = [str(one.step) for one in report.checkpoints if one.good]
    if report.newest_good is None:
        end = Text("none of them is good", "bold red")
    else:
        end = Text(f"good: {', '.join(good)}; {size(report.read_bytes)} read")
    return Group(table, Text(), *lines, end, *_told(report.told))


def removal_view(report: Removal) -> RenderableType:
    """What was removed, and what is left."""
    left = ", ".join(map(str, report.left)) or "none"
    done = Text(
        f"removed {count(len(report.removed), 'checkpoint')} and "
        f"{count(report.deleted_files, 'file')} that nothing else needed "
        f"({size(report.freed_bytes)}); left: {left}"
    )
    return Group(done, *_told(report.told))


def _told(number: int) -> list[Text]:
    return [Text(f"told the coordinator of {count(number, 'checkpoint')}", "dim")] if number else []


def _line(one: ListedCheckpoint, now: float) -> Iterator[RenderableType]:
    yield Text(str(one.step), "bold")
    if one.damaged:
        yield from ("?", Text(one.damaged, "bold red"))
        return
    yield str(one.epoch)
    yield one.checkpoint_id
    yield size(one.size_bytes)
    yield size(one.written_bytes)
    yield "full" if one.is_full else "incremental"
    yield str(one.parts)
    yield duration(max(0.0, now - one.created_at))
    yield Text("newest", "green") if one.newest else ""


def _usage(report: CheckpointList) -> Text:
    text = f"{count(len(report.checkpoints), 'checkpoint')} in {report.place}: "
    text += size(report.stored_bytes)
    if report.unneeded_bytes:
        text += f", of which {size(report.unneeded_bytes)} no checkpoint needs (saves under way, "
        text += "or leftovers that the next save collects)"
    return Text(text, "dim")


def _facts(report: ShownCheckpoint) -> Iterator[tuple[str, str]]:
    one = report.checkpoint
    yield "epoch", str(one.epoch)
    yield "size", f"{size(one.size_bytes)}, for which {size(one.written_bytes)} were stored"
    yield "kind", "full" if one.is_full else "incremental"
    yield "parts", str(one.parts)
    yield "committed", time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(one.created_at))
    yield "manifest", report.manifest
    for name, value in report.metrics.items():
        yield name, f"{value:g}"
    yield from report.metadata.items()


def _packs(packs: tuple[ShownPack, ...], step: int) -> Table:
    table = _table("size", "used", "written for", "also for", "file")
    for pack in packs:
        others = [str(other) for other in pack.needed_by if other != step]
        table.add_row(
            size(pack.size),
            size(pack.used_bytes),
            "?" if pack.step is None else f"step {pack.step}",
            ", ".join(others) or "–",
            Text(pack.file),
        )
    return table


def _arrays(
    arrays: tuple[ShownArray, ...], limit: int | None, ranks: bool
) -> Iterator[RenderableType]:
    shown = arrays if limit is None or len(arrays) <= limit + 1 else arrays[:limit]
    names = ("key", "kind", "dtype", "shape", "bytes")
    table = _table("rank", *names) if ranks else _table(*names)
    for one in shown:
        shape = "" if one.shape is None else "×".join(map(str, one.shape)) or "scalar"
        row = (Text(one.key or "–"), one.kind, one.dtype, shape, f"{one.nbytes:,}")
        table.add_row(*((str(one.rank), *row) if ranks else row))
    yield table
    if len(shown) < len(arrays):
        yield Text(f"  {count(len(arrays) - len(shown), 'array')} not shown", "dim")


def _damages(one: VerifiedCheckpoint) -> Iterator[Text]:
    for damage in one.damages:
        where = f" chunk {damage.chunk} ({damage.length:,} bytes at {damage.position:,})"
        yield Text(f"step {one.step}: {damage.file}{where if damage.chunk else ''}", "red")
        yield Text(f"  {damage.detail}", "dim")
    if one.damages:
        yield Text()


def _table(*names: str) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in names:
        left = name in _WORDS
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "id")
    return table
