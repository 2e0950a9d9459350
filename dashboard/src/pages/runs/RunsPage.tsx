import type { Action, Task } from "../../api/types";
import { NoWorkers } from "../../app/Gate";
import { href } from "../../app/router";
import { useFormat } from "../../app/settings";
import { CheckpointButton, StopButton } from "../../components/ActionButtons";
import { LogList } from "../../components/LogList";
import { Facts, PageHead, Panel } from "../../components/Panel";
import { epochWords, RunProgress } from "../../components/RunProgress";
import { TaskBadge } from "../../components/states";
import { compact, count, figure, plural } from "../../format/numbers";
import { ago } from "../../format/time";
import { useJob, useServerNow } from "../../store/hooks";
import { RunCharts } from "./RunCharts";

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
      {tasks.length === 0 ? (
        <NoWorkers />
      ) : (
        <>
          {tasks.map((task) => (
            <Run key={task.task_id} task={task} />
          ))}
          <RunCharts />
          <Requests />
        </>
      )}
    </>
  );
}

/** What was asked for and what came of it, from the journal. */
function Requests() {
  const logs = useJob((data) => data.logs);
  const entries = logs.filter((entry) => entry.event.startsWith("action.")).slice(0, REQUESTS_SHOWN);
  return (
    <Panel
      title="Requests"
      note="from operators"
      flush
      end={
        <a className="link" href={href(["journal"], { search: "action." })}>
          In the journal
        </a>
      }
    >
      {entries.length === 0 ? (
        <p className="quiet-note">No requests yet: no checkpoint, drain or stop.</p>
      ) : (
        <LogList entries={entries} />
      )}
    </Panel>
  );
}

const REQUESTS_SHOWN = 8;

const ACTION_TITLES: Record<Action["kind"], string> = {
  checkpoint: "Checkpoint",
  stop: "Stop at the next checkpoint",
  drain: "Drain",
};

function PendingActions({ actions }: { actions: Action[] }) {
  const now = useServerNow();
  return (
    <Panel title="Requested, not done yet" flush>
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
  const metrics = Object.entries(task.metrics);
  const over = task.state === "finished" || task.state === "stopped";
  return (
    <Panel title={task.task_id} end={<TaskBadge state={task.state} />}>
      <RunProgress task={task} />
      <div className="run-columns">
        <Facts
          items={[
            [
              "Step",
              task.total_steps === null ? count(task.step) : `${count(task.step)} of ${count(task.total_steps)}`,
            ],
            ["Epoch", epochWords(task).replace(/^epoch /, "") || "—"],
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
        {metrics.length > 0 && (
          <Facts items={metrics.map(([name, value]) => [over ? `last ${name}` : name, figure(value)])} />
        )}
      </div>
    </Panel>
  );
}
