import { useMemo } from "react";
import type { HistoryPoint } from "../../api/types";
import { href } from "../../app/router";
import { useFormat } from "../../app/settings";
import { Stat, StatStrip } from "../../components/Stat";
import { compact, count, figure, percent, plural } from "../../format/numbers";
import { duration, milliseconds } from "../../format/time";
import { useJob, useSelect, useServerNow } from "../../store/hooks";
import { workerCounts } from "../../store/selectors";

const SPARK_POINTS = 90;
const LOW_GOODPUT = 0.8;
/** With fewer that report step times nobody is compared, as in the coordinator. */
const LEAST_COMPARED = 3;

export function Headlines() {
  const metrics = useJob((data) => data.metrics);
  const requests = useJob((data) => data.coordinator.requests_per_second);
  const points = useSelect((state) => state.history?.points);
  const trend = useMemo(() => trends(points ?? []), [points]);
  return (
    <StatStrip label="Headline figures">
      <LiveWorkers trend={trend((point) => point.workers_live)} />
      <Stat
        label="Steps"
        value={figure(metrics.steps_per_second)}
        unit={metrics.steps_per_second === null ? "" : "/s"}
        note={metrics.steps_per_second ? `${duration(1 / metrics.steps_per_second)} each` : "none reported now"}
        trend={trend((point) => point.steps_per_second)}
      />
      <Stat
        label="Samples"
        value={compact(metrics.samples_per_second)}
        unit={metrics.samples_per_second === null ? "" : "/s"}
        note={metrics.samples_per_second === null ? "none reported now" : "read, by all workers"}
        trend={trend((point) => point.samples_per_second)}
      />
      <Stat
        label="Goodput"
        value={percent(metrics.goodput)}
        note={metrics.goodput === null ? "nobody says when it trains" : "of the last 10 min training"}
        tone={metrics.goodput !== null && metrics.goodput < LOW_GOODPUT ? "warn" : undefined}
        trend={trend((point) => point.goodput)}
      />
      <LastCheckpoint />
      <CheckpointRate trend={trend((point) => point.checkpoint_bytes_per_second)} />
      <Stat
        label="Barrier p50"
        value={milliseconds(metrics.barrier_p50_ms)}
        note={
          metrics.barriers_measured
            ? `p99 ${milliseconds(metrics.barrier_p99_ms)}, of ${count(metrics.barriers_measured)} in 10 min`
            : "none in the last 10 min"
        }
        trend={trend((point) => point.barrier_p50_ms)}
        href={href(["barriers"])}
      />
      <Stat
        label="Coordinator requests"
        value={figure(requests)}
        unit={requests === null ? "" : "/s"}
        note="gRPC calls, of all jobs"
        trend={trend((point) => point.requests_per_second)}
      />
      <Stragglers trend={trend((point) => point.stragglers)} />
    </StatStrip>
  );
}

function LiveWorkers({ trend }: { trend: (number | null)[] }) {
  const { workers_live: live, workers_dead: dead } = useJob((data) => data.metrics);
  const worldSize = useJob((data) => data.jobs.find((entry) => entry.job === data.job)?.world_size ?? 0);
  const left = useJob(workerCounts).left;
  const fine = live > 0 ? "all heard" : left > 0 ? `${count(left)} left` : "nobody has joined";
  return (
    <Stat
      label="Live workers"
      value={count(live)}
      unit={worldSize ? `of ${count(worldSize)}` : live === 1 ? "worker, elastic" : "workers, elastic"}
      note={dead > 0 ? `${count(dead)} dead` : fine}
      tone={dead > 0 ? "bad" : undefined}
      trend={trend}
      href={href(["workers"])}
    />
  );
}

function LastCheckpoint() {
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
      href={href(["checkpoints"])}
    />
  );
}

function CheckpointRate({ trend }: { trend: (number | null)[] }) {
  const rate = useJob((data) => data.metrics.checkpoint_bytes_per_second);
  const last = useJob((data) => data.checkpoints[0]);
  const format = useFormat();
  const took = last?.duration_seconds ?? null;
  const known = last && took !== null ? `${format.bytes(last.size_bytes)} in ${duration(took)}` : "not measured";
  return (
    <Stat
      label="Checkpoint rate"
      value={rate === null ? "—" : format.bytes(rate)}
      unit={rate === null ? "" : "/s"}
      note={last ? `the last: ${known}` : "none committed yet"}
      trend={trend}
      href={href(["checkpoints"])}
    />
  );
}

function Stragglers({ trend }: { trend: (number | null)[] }) {
  const { stragglers, heartbeat_age_max_seconds: oldest } = useJob((data) => data.metrics);
  const compared = useJob(workerCounts).timed;
  const known = compared >= LEAST_COMPARED;
  const heartbeat = oldest === null ? "" : `oldest heartbeat ${duration(oldest)}`;
  return (
    <Stat
      label="Stragglers"
      value={known ? count(stragglers) : "—"}
      note={known ? `of ${plural(compared, "worker")}, ${heartbeat}` : heartbeat || "nobody to compare"}
      tone={stragglers > 0 ? "warn" : undefined}
      trend={known ? trend : []}
      href={href(["workers"], { show: "stragglers" })}
    />
  );
}

function trends(points: HistoryPoint[]) {
  const recent = points.slice(-SPARK_POINTS);
  return (pick: (point: HistoryPoint) => number | null) => recent.map(pick);
}
