"""The measurements behind the HTTP API, on their own."""

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dtruntime.coordinator.http import event_log
from dtruntime.coordinator.http.metrics.job_metrics import JobMetrics
from dtruntime.coordinator.http.metrics.time_series import (
    HistoryFiles,
    RankRates,
    Rate,
    RecentQuantiles,
    ReportAge,
    Rings,
    StoredHistory,
    TimeShare,
)
from dtruntime.coordinator.http.responses import HttpError
from dtruntime.coordinator.http.security import OriginPolicy
from dtruntime.coordinator.http.snapshot.datasets import judge_epoch
from dtruntime.coordinator.http.views import Point, Recovery
from dtruntime.coordinator.state import Event
from dtruntime.coordinator.state.epochs.epoch_coverage import Covered
from dtruntime.events import sentence
from dtruntime.sharding.coverage_digest import Digest
from dtruntime.telemetry import Histogram


def test_rate_is_of_the_last_seconds_and_begins_anew_when_a_counter_goes_back() -> None:
    rate = Rate(10)
    assert rate.value is None
    for second in range(30):
        rate.add(second, second * second)
    assert rate.value == pytest.approx((29**2 - 19**2) / 10)
    rate.add(30, 5)
    assert rate.value is None
    rate.add(31, 8)
    assert rate.value == 3


def test_samples_per_second_are_unknown_until_something_was_consumed() -> None:
    figures = JobMetrics("j", None, 1.0)
    for second, consumed in enumerate((500, 500, 500)):
        figures.note_consumed(second, consumed)
        assert figures.samples_per_second is None
    figures.note_consumed(4, 900)
    assert figures.samples_per_second == 100
    for second in (70, 140):
        figures.note_consumed(second, 900)
    assert figures.samples_per_second == 0, "measured: nobody consumes any more"


def test_samples_of_all_ranks_are_added_up() -> None:
    rates = RankRates(samples=10)
    rates.add(numbers(1, 2, 3), numbers(100, 50, -1), np.array([0.0, 0.0, 0.0]))
    assert rates.total is None
    rates.add(numbers(1, 2, 4), numbers(300, 90, 70), np.array([2.0, 4.0, 2.0]))
    assert rates.total == 110


def test_quantiles_are_of_the_values_themselves_and_forget_what_is_old() -> None:
    histogram, recent = Histogram(), RecentQuantiles(seconds=20)
    assert recent.add(0, histogram) == (0, None, None)
    histogram.observe(0.004)
    assert recent.add(1, histogram) == (1, 0.004, 0.004)
    for value in (0.003, 0.001):
        histogram.observe(value)
    assert recent.add(15, histogram) == (3, 0.003, 0.004)
    assert recent.add(21, histogram) == (2, 0.001, 0.003)
    assert recent.add(60, histogram) == (0, None, None)


def test_share_of_nothing_is_unknown() -> None:
    share = TimeShare(seconds=10)
    share.add(0, 0, 0)
    assert share.value is None
    share.add(1, 1, 4)
    share.add(2, 3, 4)
    assert share.value == 0.5
    share.add(11.5, 0, 4)
    assert share.value == 3 / 8


def test_what_is_not_said_any_more_is_not_new() -> None:
    first = ReportAge.after(None, "a", 0.0)
    assert ReportAge.after(first, "a", 5.0) is first
    assert first.is_new(10.0, seconds=10)
    assert not first.is_new(10.1, seconds=10)
    slow = ReportAge.after(first, "b", 60.0)
    assert slow.is_new(239.0, seconds=10), "a step of a minute is waited for"
    assert not slow.is_new(241.0, seconds=10)


def numbers(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_step_rate_is_the_median_of_ranks_that_can_be_measured() -> None:
    rates = RankRates(samples=10)
    rates.add(numbers(1, 2, 3, 4, 5), numbers(0, 0, 100, -1, 0), np.zeros(5))
    assert rates.median is None
    # Ranks 0 and 1 advance, 2 was set back, 3 had no step, 4 was replaced.
    rates.add(numbers(1, 2, 3, 4, 9), numbers(20, 10, 50, 7, 70), np.full(5, 10.0))
    assert rates.median == 1.5


def point(at: float, loss: float | None = None) -> Point:
    return Point(at, 1, 2.0, None, None, None, None, None, None, 0, loss)


def test_history_is_fine_for_ten_minutes_and_coarse_for_six_hours() -> None:
    rings = Rings()
    for second in range(30_001):
        rings.add(point(second, float(second)))
    fine = rings.read(599, 30_000, [])
    assert (fine.resolution_seconds, len(fine.points)) == (1.0, 600)
    coarse = rings.read(21_600, 30_000, [Recovery(1, 2, 3, "w")])
    assert (coarse.resolution_seconds, len(coarse.points)) == (10.0, 2160)
    assert coarse.points[-1].at - coarse.points[-2].at == 10
    assert coarse.points[-1].loss == pytest.approx(29_994.5), "the mean of ten seconds"
    assert coarse.recoveries == []


def test_history_file_of_another_job_or_without_sense_is_not_read(tmp_path: Path) -> None:
    files = HistoryFiles(str(tmp_path))
    assert files.read("j") is None
    files.write(StoredHistory("j", [point(1)], [], []))
    assert files.read("j") == StoredHistory("j", [point(1)], [], [])
    (path,) = (tmp_path / "history").iterdir()
    path.write_bytes(msgspec.json.encode(StoredHistory("k", [], [], [])))
    assert files.read("j") is None


def reported(total: int, *parts: range, complete: bool | None = None) -> Covered:
    digests = []
    for part in parts:
        digest = Digest(total)
        digest.add(np.array(part, dtype=np.int64))
        digests.append(digest.to_bytes())
    return Covered(3, digests, total, len(parts), complete)


def test_coverage_is_exact_only_if_every_sample_was_consumed_once() -> None:
    exact, count = judge_epoch(reported(1000, range(400), range(400, 1000)), 1000)
    assert (exact.exact, exact.complete, count) == (True, True, 1000)
    part, _ = judge_epoch(reported(1000, range(400)), 1000)
    assert (part.exact, part.complete, part.missing) == (False, False, 600)
    twice, _ = judge_epoch(reported(1000, range(600), range(500, 900), complete=True), 1000)
    assert not twice.exact
    assert (twice.missing > 0, twice.repeated > 0) == (True, True)


def test_coverage_of_a_huge_dataset_compares_counts() -> None:
    total = 10**10
    seen = Digest(total)
    seen.add(np.arange(1000))
    found, _ = judge_epoch(Covered(0, [seen.to_bytes()], total, 1, False), total)
    assert (found.covered, found.missing, found.exact) == (1000, total - 1000, False)


@pytest.mark.parametrize(
    ("origin", "host", "allowed"),
    [
        ("http://10.0.0.4:3000", "10.0.0.4:3000", True),
        ("http://localhost:3000", "localhost:3000", True),
        ("http://[::1]:3000", "[::1]:3000", True),
        ("http://head-node:3000", "head-node:3000", True),
        ("http://strata.team.svc:3000", "strata.team.svc:3000", True),
        ("https://strata.example.com", "strata.example.com", True),
        ("https://strata.example.com", "10.0.0.4:3000", True),
        ("http://evil.example", "evil.example", False),
        ("http://evil.example", "10.0.0.4:3000", False),
        ("http://localhost:8080", "localhost:3000", False),
        ("null", "localhost:3000", False),
    ],
)
def test_pages_of_other_origins_are_refused(origin: str, host: str, allowed: bool) -> None:
    origins = OriginPolicy("https://strata.example.com/", "0.0.0.0")
    headers = {"origin": origin, "host": host}
    if allowed:
        origins.check(headers)
    else:
        with pytest.raises(HttpError, match="http_origins"):
            origins.check(headers)


def test_program_without_a_browser_may_use_any_name() -> None:
    OriginPolicy("", "0.0.0.0").check({"host": "strata.example.com"})


def test_every_kind_of_event_has_a_sentence() -> None:
    source = Path(event_log.__file__).parents[1]
    texts = "".join(path.read_text(encoding="utf-8") for path in (source / "state").rglob("*.py"))
    parts = "worker|barrier|checkpoint|epoch|dataset|action|coordinator"
    kinds = set(re.findall(rf'"((?:{parts})\.\w+)"', texts))
    assert kinds
    unspoken = [k for k in kinds if sentence(Event(1, 0.0, "j", k)).startswith(k)]
    assert unspoken == []


def test_texts_in_spreadsheets_are_no_formulas() -> None:
    event = Event(1, 0.0, "j", "action.requested", {"what": "=cmd()", "reason": "x"})
    assert b"'=cmd()" in event_log.as_csv([event_log.entry(event)])


def test_members_are_measured_whatever_their_ranks() -> None:
    """One worker of rank 65,535 takes the memory of one worker."""
    rates = RankRates(samples=10)
    rates.add(numbers(7, 3), numbers(10, 50), np.array([0.0, 0.0]))
    rates.add(numbers(3, 7, 9), numbers(90, 30, 1), np.array([4.0, 2.0, 2.0]))
    assert rates.total == 10 + 10
