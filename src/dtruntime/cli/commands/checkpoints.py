"""``strata checkpoints``: what is in a place, whether it is good, and away with it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

from ...checkpoint.manager import CheckpointManager
from ...client import Observer
from ...display import count, json_text, open_console, plain
from ...errors import StorageError, StrataError
from ...types import REPORTED_AT_ONCE, CheckpointCondition, CheckpointInfo
from ..checkpoints_report import (
    Removal,
    Verification,
    find,
    opened,
    read_checkpoint,
    read_list,
    remove,
    verify,
)
from ..checkpoints_view import list_view, removal_view, show_view, verify_view
from ..invocation import confirm, log_only_when_asked, progress_bar, write

ARRAYS_SHOWN = 40
"""Arrays listed on a terminal; elsewhere all are."""


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "checkpoints",
        help="list, show, verify, remove and export checkpoints",
        description="Look into a place with checkpoints: a path or a URL, as CheckpointManager "
        "takes it. Exit code 1: something is damaged, missing or cannot be done.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_action(actions, "ls", "list checkpoints", _list)
    show = _add_action(actions, "show", "show a checkpoint: arrays, files, metrics", _show)
    show.add_argument("step", metavar="STEP", type=_step, help="a step, or 'latest'")
    check = _add_action(actions, "verify", "read everything and say what is damaged", _verify)
    check.add_argument("steps", metavar="STEP", type=_whole, nargs="*", help="default: all")
    _add_coordinator(check)
    _add_rm(actions)
    export = _add_action(actions, "export", "write a checkpoint as a safetensors file", _export)
    export.add_argument("step", metavar="STEP", type=_step, help="a step, or 'latest'")
    export.add_argument("file", metavar="FILE", help="a path or a URL")


def _add_rm(actions: Any) -> None:
    rm = _add_action(actions, "rm", "remove checkpoints, and files that nothing else needs", _rm)
    rm.add_argument("steps", metavar="STEP", type=_whole, nargs="+")
    rm.add_argument("--yes", action="store_true", help="do not ask")
    rm.add_argument("--force", action="store_true", help="also the last one that is whole")
    _add_coordinator(rm)


def _add_coordinator(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="coordinator to tell (default: COORDINATOR_URL, else none)")
    parser.add_argument("--job", help="of this job (default: those with checkpoints in PLACE)")


def _add_action(
    actions: Any, name: str, text: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
    parser.add_argument("place", metavar="PLACE", help="folder, s3://, gs:// or az:// URL")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=_quietly(run))
    return parser


def _quietly(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    def face(options: argparse.Namespace) -> int:
        log_only_when_asked()
        return run(options)

    return face


def _list(options: argparse.Namespace) -> int:
    report = read_list(options.place)
    return write(report, lambda: list_view(report), options)


def _show(options: argparse.Namespace) -> int:
    report = read_checkpoint(options.place, options.step)
    limit = ARRAYS_SHOWN if open_console().is_terminal else None
    return write(report, lambda: show_view(report, limit), options)


def _verify(options: argparse.Namespace) -> int:
    with _bar("reading") as begin:
        report = verify(options.place, options.steps, begin)
    told = _tell(options, report.place, found(report))
    report = msgspec.structs.replace(report, told=told)
    write(report, lambda: verify_view(report), options)
    return 0 if report.good else 1


def _rm(options: argparse.Namespace) -> int:
    def ask(where: str, steps: Sequence[int]) -> None:
        if not options.yes:
            question = f"remove {count(len(steps), 'checkpoint')} ({_some(steps)}) from {where}?"
            confirm(question, StorageError("nothing was removed"))

    report = remove(options.place, options.steps, force=options.force, confirm=ask)
    told = _tell(options, report.place, gone(report))
    report = msgspec.structs.replace(report, told=told)
    return write(report, lambda: removal_view(report), options)


def _tell(options: argparse.Namespace, place: str, findings: Sequence[CheckpointFinding]) -> int:
    """Tell the coordinator, if there is one; that it cannot be told changes nothing here."""
    url = options.url or os.environ.get("COORDINATOR_URL")
    if not url:
        return 0
    try:
        with Observer(url) as observer:
            return tell(observer, options.job, place, findings)
    except StrataError as exc:
        print(f"the coordinator was not told: {plain(str(exc))}", file=sys.stderr)
        return 0


def _export(options: argparse.Namespace) -> int:
    try:
        from ...checkpoint.safetensors import export_safetensors
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
    """A bar on the terminal; it is begun with the number of bytes, and then told of some."""
    columns = TextColumn(doing), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with progress_bar(*columns) as bar:

        def begin(total: int) -> Callable[[int], None]:
            task = bar.add_task(doing, total=total)
            return lambda size: bar.advance(task, size)

        yield begin


def _some(steps: Sequence[int]) -> str:
    shown = ", ".join(str(step) for step in steps[:8])
    return shown if len(steps) <= 8 else f"{shown} and {len(steps) - 8} more"


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a step")
    return int(text)


def _step(text: str) -> int | None:
    return None if text == "latest" else _whole(text)


@dataclass(frozen=True, slots=True)
class CheckpointFinding:
    """What became of one checkpoint."""

    checkpoint_id: str
    condition: CheckpointCondition
    detail: str = ""
    file: str = ""
    """Its manifest, where the id cannot be read."""


def found(report: Verification) -> list[CheckpointFinding]:
    """What verifying has found."""
    findings = []
    for one in report.checkpoints:
        if one.good:
            findings.append(CheckpointFinding(one.checkpoint_id, CheckpointCondition.GOOD))
            continue
        first = one.damages[0]
        file = "" if one.checkpoint_id else first.file
        detail = f"{first.file}: {first.detail}"
        findings.append(
            CheckpointFinding(one.checkpoint_id, CheckpointCondition.DAMAGED, detail, file)
        )
    return findings


def gone(report: Removal) -> list[CheckpointFinding]:
    """What was removed."""
    removed = CheckpointCondition.REMOVED
    return [CheckpointFinding(key, removed, "by an operator") for key in report.removed_ids]


def tell(
    observer: Observer, job: str | None, place: str, findings: Sequence[CheckpointFinding]
) -> int:
    """Tell the job that is named, or all that have checkpoints in this place; returns how often."""
    told = 0
    for name in observer.jobs() if job is None else [job]:
        known = [
            one for one in observer.checkpoints(name) if job is not None or _lies_in(one, place)
        ]
        for condition, detail, ids in _grouped(findings, known):
            told += observer.report_checkpoints(name, ids, condition, detail)
    return told


def _grouped(
    findings: Sequence[CheckpointFinding], known: Sequence[CheckpointInfo]
) -> Iterator[tuple[CheckpointCondition, str, list[str]]]:
    """The ids of those that are known, as many together as can be said at once."""
    ids = {one.checkpoint_id for one in known}
    paths = {one.path: one.checkpoint_id for one in known}
    groups: dict[tuple[CheckpointCondition, str], list[str]] = {}
    for finding in findings:
        key = finding.checkpoint_id if finding.checkpoint_id in ids else paths.get(finding.file)
        if key:
            groups.setdefault((finding.condition, finding.detail), []).append(key)
    for (condition, detail), keys in groups.items():
        for start in range(0, len(keys), REPORTED_AT_ONCE):
            yield condition, detail, keys[start : start + REPORTED_AT_ONCE]


def _lies_in(checkpoint: CheckpointInfo, place: str) -> bool:
    return checkpoint.path.startswith(place.rstrip("/") + "/")
