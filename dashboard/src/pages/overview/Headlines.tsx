import { useMemo } from "react";
import type { HistoryPoint } from "../../api/types";
import { href } from "../../app/router";
import { useFormat } from "../../app/settings";
import { Stat, StatStrip } from "../../components/Stat";
import { compact, count, figure, percent } from "../../format/numbers";
import { duration, milliseconds } from "../../format/time";
import { useJob, useSelect, useServerNow } from "../../store/hooks";

const SPARK_POINTS = 90;
const LOW_GOODPUT = 0.8;

export function Headlines() {
  const metrics = useJob((data) => data.metrics);
  const worldSize = useJob((data) => data.jobs.find((entry) => entry.job === data.job)?.world_size ?? null);
  const points = useSelect((state) => state.history?.points);
  const trend = useMemo(() => trends(points ?? []), [points]);
  const short = metrics.workers_dead > 0;
  return (
    <StatStrip label="Headline figures">
      <Stat
        label="Live workers"
        value={count(metrics.workers_live)}
        unit={worldSize === null ? "" : `of ${count(worldSize)}`}
        note={short ? `${count(metrics.workers_dead)} dead` : "all heard"}
        tone={short ? "bad" : undefined}
        trend={trend((point) => point.workers_live)}
        href={href(["workers"])}
      />
      <Stat
        label="Steps"
        value={figure(metrics.steps_per_second)}
        unit={metrics.steps_per_second === null ? "" : "/s"}
        note={metrics.steps_per_second ? `${duration(1 / metrics.steps_per_second)} each` : "no steps now"}
        trend={trend((point) => point.steps_per_second)}
      />
      <Stat
        label="Samples"
        value={compact(metrics.samples_per_second)}
        unit={metrics.samples_per_second === null ? "" : "/s"}
        note={metrics.samples_per_second === null ? "not reported yet" : "read and trained on"}
        trend={trend((point) => point.samples_per_second)}
      />
      <Stat
        label="Goodput"
        value={percent(metrics.goodput)}
        note="of time spent training"
        tone={metrics.goodput !== null && metrics.goodput < LOW_GOODPUT ? "warn" : undefined}
        trend={trend((point) => point.goodput)}
      />
      <LastCheckpoint trend={trend((point) => point.checkpoint_bytes_per_second)} />
      <Stat
        label="Barrier p50"
        value={milliseconds(metrics.barrier_p50_ms)}
        note={`p99 ${milliseconds(metrics.barrier_p99_ms)}`}
        trend={trend((point) => point.barrier_p50_ms)}
        href={href(["barriers"])}
      />
      <Stat
        label="Stragglers"
        value={count(metrics.stragglers)}
        note={
          metrics.heartbeat_age_max_seconds === null
            ? ""
            : `oldest heartbeat ${duration(metrics.heartbeat_age_max_seconds)}`
        }
        tone={metrics.stragglers > 0 ? "warn" : undefined}
        trend={trend((point) => point.stragglers)}
        href={href(["workers"], { show: "stragglers" })}
      />
    </StatStrip>
  );
}

function LastCheckpoint({ trend }: { trend: (number | null)[] }) {
  const last = useJob((data) => data.checkpoints[0]);
  const now = useServerNow();
  const format = useFormat();
  if (!last) return <Stat label="Last checkpoint" value="—" note="none committed yet" href={href(["checkpoints"])} />;
  return (
    <Stat
      label="Last checkpoint"
      value={duration(Math.floor(Math.max(0, now - last.committed_at)))}
      unit="ago"
      note={`${format.bytes(last.size_bytes)}, step ${count(last.step)}`}
      trend={trend}
      href={href(["checkpoints"])}
    />
  );
}

function trends(points: HistoryPoint[]) {
  const recent = points.slice(-SPARK_POINTS);
  return (pick: (point: HistoryPoint) => number | null) => recent.map(pick);
}
