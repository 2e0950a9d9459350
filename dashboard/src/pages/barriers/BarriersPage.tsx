import { useMemo } from "react";
import type { Barriers, OpenBarrier } from "../../api/types";
import { href } from "../../app/router";
import { ColumnChart } from "../../charts/ColumnChart";
import { gapOf, LineChart } from "../../charts/LineChart";
import { EmptyState, PageHead, Panel } from "../../components/Panel";
import { Stat, StatStrip } from "../../components/Stat";
import { ProgressBar } from "../../components/states";
import { count, plural } from "../../format/numbers";
import { duration, milliseconds } from "../../format/time";
import { useJob, useNow, useSelect } from "../../store/hooks";

const MISSING_SHOWN = 24;

export function BarriersPage() {
  const barriers = useJob((data) => data.barriers);
  const untouched = barriers.completed_total === 0 && barriers.open.length === 0;
  if (untouched) {
    return (
      <>
        <PageHead title="Barriers" />
        <EmptyState title="No barriers yet" code={'worker.barrier("epoch-0", timeout_ms=60_000)'}>
          Workers wait for each other at a barrier. This page shows who is missing and how long each one took.
        </EmptyState>
      </>
    );
  }
  return (
    <>
      <PageHead title="Barriers" summary={barriers.open.length ? `${count(barriers.open.length)} open` : "none open"} />
      <StatStrip label="Barrier figures">
        <Stat
          label="Open"
          value={count(barriers.open.length)}
          tone={barriers.open.length ? "warn" : undefined}
          note="waiting for somebody"
        />
        <Stat label="Completed" value={count(barriers.completed_total)} note="in all" />
        <Stat label="p50" value={milliseconds(barriers.p50_ms)} note={ofHowMany(barriers)} />
        <Stat label="p99" value={milliseconds(barriers.p99_ms)} note={ofHowMany(barriers)} />
      </StatStrip>
      <OpenBarriers open={barriers.open} />
      <div className="columns-1-1">
        <LatencyHistogram barriers={barriers} />
        <LatencyOverTime />
      </div>
    </>
  );
}

/** What the quantiles are of. */
function ofHowMany({ measured }: Barriers): string {
  return measured ? `of ${plural(measured, "barrier")} in the last 10 min` : "none in the last 10 min";
}

function OpenBarriers({ open }: { open: OpenBarrier[] }) {
  return (
    <Panel title="Open barriers" flush>
      {open.length === 0 ? (
        <p className="quiet-note">
          No one is waiting. A barrier appears here while some workers have arrived and others have not.
        </p>
      ) : (
        <ol className="barriers">
          {open.map((barrier) => (
            <Barrier key={`${barrier.barrier_id}#${barrier.round}`} barrier={barrier} />
          ))}
        </ol>
      )}
    </Panel>
  );
}

function Barrier({ barrier }: { barrier: OpenBarrier }) {
  const now = useNow(250);
  const receivedAt = useJob((data) => data.barriers_at_ms);
  const seconds = barrier.open_seconds + Math.max(0, now - receivedAt) / 1000;
  const hidden = barrier.missing.length - MISSING_SHOWN;
  return (
    <li>
      <div className="barrier-head">
        <b className="mono">{barrier.barrier_id}</b>
        <span className="muted num">round {count(barrier.round)}</span>
        <span className="num">
          {count(barrier.arrived)} of {count(barrier.expected)} arrived
        </span>
        <span className="num muted">open for {duration(seconds)}</span>
      </div>
      <ProgressBar
        fraction={barrier.expected ? barrier.arrived / barrier.expected : null}
        label={`${barrier.barrier_id}: arrived`}
        tone="warn"
      />
      <p className="absentees">
        <span className="muted">Missing</span>
        {barrier.missing.slice(0, MISSING_SHOWN).map((worker) => (
          <a key={worker.worker_id} className="badge warn" href={href(["workers", worker.worker_id])}>
            {worker.worker_id}
            {worker.step !== null && ` at step ${count(worker.step)}`}
          </a>
        ))}
        {hidden > 0 && <span className="muted">and {count(hidden)} more</span>}
      </p>
    </li>
  );
}

/** The histogram's buckets without the empty ones at both ends. */
export function occupied(histogram: Barriers["histogram"]): Barriers["histogram"] {
  const first = histogram.findIndex((bucket) => bucket.count > 0);
  const last = histogram.findLastIndex((bucket) => bucket.count > 0);
  return first < 0 ? [] : histogram.slice(Math.max(0, first - 1), last + 2);
}

function LatencyHistogram({ barriers }: { barriers: Barriers }) {
  const buckets = useMemo(() => occupied(barriers.histogram), [barriers.histogram]);
  const p99 = barriers.p99_ms;
  const columns = buckets.map((bucket) => ({
    name: bucket.le_ms === null ? "more" : milliseconds(bucket.le_ms).replace(" ", "\u2009"),
    value: bucket.count,
    marked: false,
  }));
  const total = buckets.reduce((sum, bucket) => sum + bucket.count, 0);
  return (
    <Panel title="Latency" note="first arrival to completion, since the coordinator started">
      {columns.length === 0 ? (
        <p className="quiet-note">No barrier has completed since the coordinator started.</p>
      ) : (
        <ColumnChart
          label={`Barrier latencies, p99 ${milliseconds(p99)}`}
          columns={columns}
          format={count}
          axisTitle="completed within"
          height={236}
          describe={(column) => (
            <>
              <b>within {column.name}</b>
              <span className="num">{plural(column.value, "barrier")}</span>
              <span className="num muted">{total ? ((column.value / total) * 100).toFixed(1) : 0}%</span>
            </>
          )}
        />
      )}
    </Panel>
  );
}

function LatencyOverTime() {
  const history = useSelect((state) => state.history);
  const points = history?.points;
  const times = useMemo(() => (points ?? []).map((point) => point.at), [points]);
  const series = useMemo(
    () => [
      { name: "p99", values: (points ?? []).map((point) => point.barrier_p99_ms), tone: "second" as const },
      { name: "p50", values: (points ?? []).map((point) => point.barrier_p50_ms), tone: "accent" as const, area: true },
    ],
    [points],
  );
  return (
    <Panel
      title="Over time"
      end={
        <p className="legend">
          <span>
            <i className="key accent" /> p50
          </span>
          <span>
            <i className="key second" /> p99
          </span>
        </p>
      }
    >
      <LineChart
        label="Barrier latency over time"
        times={times}
        series={series}
        format={(value) => milliseconds(value)}
        height={236}
        gap={gapOf(history)}
      />
    </Panel>
  );
}
