import type { Action, Task } from "../../api/types";
import { NoWorkers } from "../../app/Gate";
import { useFormat } from "../../app/settings";
import { CheckpointButton, StopButton } from "../../components/ActionButtons";
import { Facts, PageHead, Panel } from "../../components/Panel";
import { ProgressBar, TaskBadge } from "../../components/states";
import { compact, count, figure, percent, plural } from "../../format/numbers";
import { ago, duration } from "../../format/time";
import { useJob, useServerNow } from "../../store/hooks";

export function RunsPage() {
  const tasks = useJob((data) => data.tasks);
  const actions = useJob((data) => data.actions);
  const active = tasks.some(
    (task) => task.state === "running" || task.state === "recovering" || task.state === "waiting",
  );
  return (
    <>
      <PageHead
        title="Runs"
        summary={tasks.length ? plural(tasks.length, "run") : undefined}
        actions={
          active ? (
            <>
              <CheckpointButton />
              <StopButton />
            </>
          ) : undefined
        }
      />
      {actions.length > 0 && <PendingActions actions={actions} />}
      {tasks.length === 0 ? <NoWorkers /> : tasks.map((task) => <Run key={task.task_id} task={task} />)}
    </>
  );
}

const ACTION_TITLES: Record<Action["kind"], string> = {
  checkpoint: "Checkpoint",
  stop: "Stop at the next checkpoint",
  drain: "Drain",
};

function PendingActions({ actions }: { actions: Action[] }) {
  const now = useServerNow();
  return (
    <Panel title="Asked for, not done yet" flush>
      <ul className="pending">
        {actions.map((action) => (
          <li key={action.action_id}>
            <i className="dot warn" />
            <b>
              {ACTION_TITLES[action.kind]} {action.worker_id}
            </b>
            {action.reason && <span className="soft">{action.reason}</span>}
            <span className="muted num">{ago(action.requested_at, now)}</span>
          </li>
        ))}
      </ul>
    </Panel>
  );
}

function Run({ task }: { task: Task }) {
  const now = useServerNow();
  const format = useFormat();
  const over = task.state === "finished" || task.state === "stopped";
  const metrics = Object.entries(task.metrics);
  return (
    <Panel title={task.task_id} end={<TaskBadge state={task.state} />}>
      <div className="run-progress">
        <b className="num">{percent(task.progress)}</b>
        <ProgressBar
          fraction={task.progress}
          label={`Progress of ${task.task_id}`}
          tone={over ? "quiet" : task.state === "recovering" ? "warn" : "accent"}
        />
        <span className="num muted">
          {over
            ? task.state
            : task.eta_seconds === null
              ? "time left not known"
              : `${duration(Math.round(task.eta_seconds))} left`}
        </span>
      </div>
      <div className="run-columns">
        <Facts
          items={[
            ["Step", count(task.step)],
            [
              "Epoch",
              task.epochs === null
                ? count(task.epoch + 1)
                : `${count(Math.min(task.epoch + 1, task.epochs))} of ${count(task.epochs)}`,
            ],
            [
              "Samples",
              task.total_samples === null
                ? compact(task.samples)
                : `${compact(task.samples)} of ${compact(task.total_samples)}`,
            ],
          ]}
        />
        <Facts
          items={[
            ["Steps/s", figure(task.steps_per_second)],
            [
              "Started",
              <span key="s" title={format.dateTime(task.started_at)}>
                {ago(task.started_at, now)}
              </span>,
            ],
            ["Job", task.job],
          ]}
        />
        {metrics.length > 0 && <Facts items={metrics.map(([name, value]) => [name, figure(value)])} />}
      </div>
    </Panel>
  );
}
