import type { Task } from "../../api/types";
import { CheckpointButton } from "../../components/ActionButtons";
import { epochWords, RunProgress } from "../../components/RunProgress";
import { TaskBadge } from "../../components/states";
import { count, figure } from "../../format/numbers";
import { ago } from "../../format/time";
import { useJob, useServerNow } from "../../store/hooks";
import { currentTask } from "../../store/selectors";

/** The run that is going on, in one line and a bar. */
export function CurrentRun() {
  const task = useJob(currentTask);
  if (!task) {
    return (
      <section className="run-hero" aria-label="Current run">
        <p className="soft">Workers have joined. The run appears when one of them reports its first step.</p>
      </section>
    );
  }
  return <Running task={task} />;
}

function Running({ task }: { task: Task }) {
  const now = useServerNow();
  const epoch = epochWords(task);
  const over = task.state === "finished" || task.state === "stopped";
  return (
    <section className="run-hero" aria-label="Current run">
      <div className="run-line">
        <h2 className="truncate">{task.task_id}</h2>
        <TaskBadge state={task.state} />
        <span className="run-facts num">
          {task.step !== null && <span>step {count(task.step)}</span>}
          {epoch && <span>{epoch}</span>}
          {Object.entries(task.metrics)
            .slice(0, 1)
            .map(([name, value]) => (
              <span key={name}>
                {over ? "last " : ""}
                {name} {figure(value)}
              </span>
            ))}
          <span>started {ago(task.started_at, now)}</span>
        </span>
        {!over && <CheckpointButton />}
      </div>
      <RunProgress task={task} />
    </section>
  );
}
