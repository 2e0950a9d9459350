"""``strata checkpoints``: list, show, verify, remove and export the checkpoints in a place."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import msgspec
from rich.console import Group, RenderableType
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ..checkpoint.manager import CheckpointManager
from ..client import Observer
from ..display import count, duration, json_text, open_console, plain, size
from ..errors import StorageError, StrataError
from ..types import REPORTED_AT_ONCE, CheckpointCondition
from .checkpoints_report import (
    CheckpointList,
    ListedCheckpoint,
    Removal,
    ShownCheckpoint,
    Verification,
    find,
    opened,
    read_checkpoint,
    read_list,
    remove,
    verify,
)
from .invocation import (
    add_action,
    add_command,
    confirm,
    cut,
    facts_table,
    limit_on_terminal,
    listing,
    progress_bar,
    write,
)

ARRAYS_SHOWN = 40
"""Arrays listed on a terminal; elsewhere all are."""
STEPS_NAMED = 8
_TEXT = {"id", "kind", "file", "key", "dtype", "shape", "verdict", "written for", "also for"}
"""Columns that are no numbers."""


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    actions = add_command(
        subparsers,
        "checkpoints",
        help="list, show, verify, remove and export checkpoints",
        description="Look into a place with checkpoints: a path or a URL, as CheckpointManager "
        "takes it. Exit code 1: something is damaged, missing or cannot be done.",
    )
    _add_action(actions, "ls", "list checkpoints", _list)
    show = _add_action(actions, "show", "show a checkpoint: arrays, files, metrics", _show)
    check = _add_action(actions, "verify", "read everything and report what is damaged", _verify)
    check.add_argument("steps", metavar="STEP", type=_whole, nargs="*", help="default: all")
    rm = _add_action(actions, "rm", "remove checkpoints, and files that nothing else needs", _rm)
    rm.add_argument("steps", metavar="STEP", type=_whole, nargs="+")
    rm.add_argument("--yes", action="store_true", help="do not ask")
    rm.add_argument("--force", action="store_true", help="even the last one that is whole")
    for parser in (check, rm):
        parser.add_argument(
            "--url", help="coordinator to inform (default: COORDINATOR_URL, else none)"
        )
        parser.add_argument("--job", help="of this job (default: those with checkpoints in PLACE)")
    export = _add_action(actions, "export", "write a checkpoint as a safetensors file", _export)
    for parser in (show, export):
        parser.add_argument("step", metavar="STEP", type=_step, help="a step, or 'latest'")
    export.add_argument("file", metavar="FILE", help="a path or a URL")


def _add_action(
    actions: Any, name: str, text: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser = add_action(actions, name, text, run)
    parser.add_argument("place", metavar="PLACE", help="folder, s3://, gs:// or az:// URL")
    return parser


def _list(options: argparse.Namespace) -> int:
    report = read_list(options.place)
    return write(report, lambda: _list_view(report), options)


def _show(options: argparse.Namespace) -> int:
    report = read_checkpoint(options.place, options.step)
    return write(report, lambda: _show_view(report), options)


def _verify(options: argparse.Namespace) -> int:
    with _bar("reading") as begin:
        report = verify(options.place, options.steps, begin)
    findings = []
    for one in report.checkpoints:
        if one.good:
            findings.append((one.checkpoint_id, "", CheckpointCondition.GOOD, ""))
        else:
            first = one.damages[0]
            detail = f"{first.file}: {first.detail}"
            damaged = CheckpointCondition.DAMAGED
            findings.append((one.checkpoint_id, first.file, damaged, detail))
    told = _inform(options, report.place, findings)
    report = msgspec.structs.replace(report, told=told)
    write(report, lambda: _verify_view(report), options)
    return 0 if report.good else 1


def _rm(options: argparse.Namespace) -> int:
    def ask(where: str, steps: Sequence[int]) -> None:
        if not options.yes:
            named = ", ".join(map(str, steps[:STEPS_NAMED]))
            if len(steps) > STEPS_NAMED:
                named += f" and {len(steps) - STEPS_NAMED} more"
            question = f"remove {count(len(steps), 'checkpoint')} ({named}) from {where}?"
            confirm(question, StorageError("nothing was removed"))

    report = remove(options.place, options.steps, force=options.force, confirm=ask)
    removed = CheckpointCondition.REMOVED
    findings = [(key, "", removed, "by an operator") for key in report.removed_ids]
    told = _inform(options, report.place, findings)
    report = msgspec.structs.replace(report, told=told)
    return write(report, lambda: _removal_view(report), options)


Reported: TypeAlias = tuple[str, str, CheckpointCondition, str]
"""The id of a checkpoint, its manifest where the id cannot be read, its condition, the detail."""


def _inform(options: argparse.Namespace, place: str, findings: Sequence[Reported]) -> int:
    """Inform the coordinator, if there is one; a failure changes nothing here.

    Returns how many checkpoints it was informed of.
    """
    url = options.url or os.environ.get("COORDINATOR_URL")
    if not url:
        return 0
    try:
        with Observer(url) as observer:
            jobs = observer.jobs() if options.job is None else [options.job]
            return sum(_report(observer, job, options.job, place, findings) for job in jobs)
    except StrataError as exc:
        print(f"could not inform the coordinator: {plain(str(exc))}", file=sys.stderr)
        return 0


def _report(
    observer: Observer,
    job: str,
    named: str | None,
    place: str,
    findings: Sequence[Reported],
) -> int:
    """Report to a job what it knows: if it was not named, of the checkpoints in this place."""
    inside = place.rstrip("/") + "/"
    checkpoints = observer.checkpoints(job)
    known = [one for one in checkpoints if named is not None or one.path.startswith(inside)]
    ids = {one.checkpoint_id for one in known}
    paths = {one.path: one.checkpoint_id for one in known}
    groups: dict[tuple[CheckpointCondition, str], list[str]] = {}
    for checkpoint_id, file, condition, detail in findings:
        key = checkpoint_id or paths.get(file)
        if key and key in ids:
            groups.setdefault((condition, detail), []).append(key)
    return sum(
        observer.report_checkpoints(job, keys[start : start + REPORTED_AT_ONCE], *condition)
        for condition, keys in groups.items()
        for start in range(0, len(keys), REPORTED_AT_ONCE)
    )


def _export(options: argparse.Namespace) -> int:
    try:
        from ..checkpoint.safetensors import export_safetensors
    except ImportError as exc:
        raise StorageError(f"this installation cannot write safetensors files: {exc}") from exc
    with opened(options.place) as (where, catalog):
        step = find(catalog, where, options.step).step
    with CheckpointManager(options.place) as manager, _bar("writing") as begin:
        try:
            export_safetensors(manager, step, options.file, progress=begin)
        except TypeError as exc:
            raise StorageError(f"step {step} of {where} cannot be exported: {exc}") from exc
    if options.json:
        document = {"schema": 1, "step": step, "file": options.file}
        print(json_text(document, indent=False))
    else:
        open_console().print(f"wrote step {step} to {options.file}", markup=False, soft_wrap=True)
    return 0


@contextmanager
def _bar(doing: str) -> Iterator[Callable[[int], Callable[[int], None]]]:
    """A bar on the terminal, begun with the number of bytes; returns what advances it."""
    columns = TextColumn(doing), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with progress_bar(*columns) as bar:

        def begin(total: int) -> Callable[[int], None]:
            task = bar.add_task(doing, total=total)
            return lambda size: bar.advance(task, size)

        yield begin


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a step")
    return int(text)


def _step(text: str) -> int | None:
    return None if text == "latest" else _whole(text)


def _list_view(report: CheckpointList) -> RenderableType:
    names = ("step", "epoch", "id", "size", "stored", "kind", "parts", "age", "")
    table = _table(*names)
    for one in report.checkpoints:
        table.add_row(*_line(one))
    text = f"{count(len(report.checkpoints), 'checkpoint')} in {report.place}: "
    text += size(report.stored_bytes)
    if report.unneeded_bytes:
        text += f", of which {size(report.unneeded_bytes)} no checkpoint needs (saves under way, "
        text += "or leftovers that the next save collects)"
    return Group(table, Text(), Text(text, "dim"))


def _line(one: ListedCheckpoint) -> list[RenderableType]:
    step = Text(str(one.step), "bold")
    if one.damaged:
        return [step, "?", Text(one.damaged, "bold red")]
    return [
        step,
        str(one.epoch),
        one.checkpoint_id,
        size(one.size_bytes),
        size(one.written_bytes),
        "full" if one.is_full else "incremental",
        str(one.parts),
        duration(max(0.0, time.time() - one.created_at)),
        Text("newest", "green") if one.newest else "",
    ]


def _show_view(report: ShownCheckpoint) -> RenderableType:
    one = report.checkpoint
    head = Text.assemble((f"step {one.step}", "bold"), f", checkpoint {one.checkpoint_id}")
    packs = _table("size", "used", "written for", "also for", "file")
    for pack in report.packs:
        packs.add_row(
            size(pack.size),
            size(pack.used_bytes),
            "?" if pack.step is None else f"step {pack.step}",
            ", ".join(str(other) for other in pack.needed_by if other != one.step) or "–",
            Text(pack.file),
        )
    parts: list[RenderableType] = [head, facts_table(_facts(report)), Text(), packs]
    if report.arrays:
        arrays, hidden = cut(report.arrays, limit_on_terminal(ARRAYS_SHOWN), "array")
        has_ranks = one.parts > 1
        table = _table(*["rank"] * has_ranks, "key", "kind", "dtype", "shape", "bytes")
        for array in arrays:
            shape = "" if array.shape is None else "×".join(map(str, array.shape)) or "scalar"
            row = (Text(array.key or "–"), array.kind, array.dtype, shape, f"{array.nbytes:,}")
            table.add_row(*[str(array.rank)] * has_ranks, *row)
        parts += [Text(), table, *hidden]
    return Group(*parts)


def _facts(report: ShownCheckpoint) -> Iterator[tuple[str, RenderableType]]:
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


def _verify_view(report: Verification) -> RenderableType:
    table, lines = _table("step", "id", "chunks", "verdict"), []
    for one in report.checkpoints:
        verdict = Text("good", "green") if one.good else Text("DAMAGED", "bold red")
        table.add_row(str(one.step), one.checkpoint_id or "?", f"{one.chunks:,}", verdict)
        for damage in one.damages:
            where = f" chunk {damage.chunk} ({damage.length:,} bytes at {damage.position:,})"
            text = f"step {one.step}: {damage.file}{where if damage.chunk else ''}"
            lines += [Text(text, "red"), Text(f"  {damage.detail}", "dim")]
        lines += [Text()] if one.damages else []
    good = ", ".join(str(one.step) for one in report.checkpoints if one.good)
    end = Text(f"good: {good}; {size(report.read_bytes)} read")
    if report.newest_good is None:
        end = Text("none of them is good", "bold red")
    return Group(table, Text(), *lines, end, *_told(report.told))


def _removal_view(report: Removal) -> RenderableType:
    left = ", ".join(map(str, report.left)) or "none"
    done = Text(
        f"removed {count(len(report.removed), 'checkpoint')} and "
        f"{count(report.deleted_files, 'file')} that nothing else needed "
        f"({size(report.freed_bytes)}); left: {left}"
    )
    return Group(done, *_told(report.told))


def _told(number: int) -> list[Text]:
    text = f"reported {count(number, 'checkpoint')} to the coordinator"
    return [Text(text, "dim")] if number else []


def _table(*names: str) -> Table:
    return listing(names, _TEXT, wrapped="id")
