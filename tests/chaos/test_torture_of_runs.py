"""Whole runs, tortured for as long as `STRATA_CHAOS_MINUTES` says (30).

`STRATA_CHAOS_SEED` repeats a torture's choices, with `STRATA_CHAOS_ROUND` those of one round, and
`STRATA_CHAOS_REPORT` says where the report goes.
"""

import faulthandler
import os
import random
import time
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.harness import environment
from tests.chaos.torture.disk import why_no_small_disk
from tests.chaos.torture.plan import Place, plan_round
from tests.chaos.torture.report import Report
from tests.chaos.torture.rounds import TIMEOUT, Round
from tests.support.servers.s3_server import s3_server

__all__ = ["s3_server"]

MINUTES = float(os.environ.get("STRATA_CHAOS_MINUTES", "30"))
SEED = int(os.environ.get("STRATA_CHAOS_SEED") or random.SystemRandom().randrange(10**9))
ONLY = os.environ.get("STRATA_CHAOS_ROUND") or None
REPORT = Path(os.environ.get("STRATA_CHAOS_REPORT", "benchmarks/results/chaos.json"))


@pytest.fixture
def s3(request: pytest.FixtureRequest) -> dict[str, str] | None:
    """The way to an object store, if there can be one."""
    try:
        found: dict[str, str] = request.getfixturevalue("s3_server")
    except pytest.skip.Exception:
        return None
    return found


@pytest.mark.chaos
@pytest.mark.timeout(60 * MINUTES + 900)
def test_tortured_runs_end_as_if_nothing_had_happened(
    s3: dict[str, str] | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faulthandler.cancel_dump_traceback_later()  # that it takes long does not mean that it is stuck
    places: list[Place] = ["folder"]
    left_out = []
    if why := why_no_small_disk(tmp_path / "probe"):
        left_out.append(f"full disks: {why}")
    else:
        places.append("disk")
    if s3 is None:
        left_out.append("S3: the server cannot be installed")
    else:
        places.append("s3")
    if not left_out:
        places.append("tiers")
    report = Report(SEED, left_out, environment(["dtruntime", "obstore", "grpcio", "numpy"]))
    console = Console(width=100)
    end = time.monotonic() + 60 * MINUTES
    number = int(ONLY or 0)
    with capsys.disabled():
        console.print(f"\nagain with the same choices: STRATA_CHAOS_SEED={SEED}")
        while True:
            plan = plan_round(SEED, number, places, TIMEOUT)
            result = Round(plan, tmp_path / f"round-{number}", s3).run()
            report.results.append(result)
            verdict = "[red]FAILED[/red]" if result.failure else "good"
            console.print(f"round {number}: {verdict}, {result.seconds:.0f} s, {plan.title}")
            report.write(REPORT)
            number += 1
            if ONLY is not None or time.monotonic() > end:
                break
        report.show(console)
        console.print(f"report: {REPORT}")
    assert not report.failures, "\n\n".join(report.failures)
