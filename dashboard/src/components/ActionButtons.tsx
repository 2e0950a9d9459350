import { useState } from "react";
import type { ActionKind } from "../api/types";
import { useActions } from "../app/actions";
import { useJob } from "../store/hooks";
import { Dialog } from "./Dialog";
import { Icon } from "./icons";

function usePending(kind: ActionKind, workerId = ""): boolean {
  const actions = useJob((data) => data.actions);
  return actions.some((action) => action.kind === kind && (workerId === "" || action.worker_id === workerId));
}

export function CheckpointButton({ primary = false }: { primary?: boolean }) {
  const { ask, busy } = useActions();
  const pending = usePending("checkpoint");
  return (
    <button
      type="button"
      className={primary ? "button primary" : "button"}
      disabled={busy || pending}
      onClick={() => void ask({ kind: "checkpoint" })}
    >
      <Icon name="save" />
      {pending ? "Checkpoint requested" : "Checkpoint now"}
    </button>
  );
}

export function StopButton() {
  const pending = usePending("stop");
  const [open, setOpen] = useState(false);
  return (
    <>
      <button type="button" className="button danger" disabled={pending} onClick={() => setOpen(true)}>
        <Icon name="stop" />
        {pending ? "Stopping at the next checkpoint" : "Stop at the next checkpoint"}
      </button>
      {open && (
        <ConfirmAction
          kind="stop"
          title="Stop at the next checkpoint?"
          text="The workers finish their current step, commit a checkpoint, and end the run. Nothing is lost: when started again, it resumes from there."
          confirm="Stop the run"
          onClose={() => setOpen(false)}
        />
      )}
    </>
  );
}

export function DrainButton({ workerId }: { workerId: string }) {
  const pending = usePending("drain", workerId);
  const [open, setOpen] = useState(false);
  return (
    <>
      <button type="button" className="button danger" disabled={pending} onClick={() => setOpen(true)}>
        <Icon name="leave" />
        {pending ? "Draining" : "Drain"}
      </button>
      {open && (
        <ConfirmAction
          kind="drain"
          workerId={workerId}
          title={`Drain ${workerId}?`}
          text="It leaves after its current step. Its shards move to the others, and its rank is free for a replacement."
          confirm="Drain the worker"
          onClose={() => setOpen(false)}
        />
      )}
    </>
  );
}

interface ConfirmActionProps {
  kind: ActionKind;
  workerId?: string;
  title: string;
  text: string;
  confirm: string;
  onClose: () => void;
}

function ConfirmAction({ kind, workerId, title, text, confirm, onClose }: ConfirmActionProps) {
  const { ask, busy } = useActions();
  const [reason, setReason] = useState("");
  const submit = async () => {
    const worker = workerId === undefined ? {} : { worker_id: workerId };
    await ask({ kind, ...worker, ...(reason.trim() ? { reason: reason.trim() } : {}) });
    onClose();
  };
  return (
    <Dialog title={title} onClose={onClose}>
      <p className="soft">{text}</p>
      <label>
        Reason, for the journal
        <input
          value={reason}
          maxLength={200}
          placeholder="optional"
          onChange={(event) => setReason(event.target.value)}
        />
      </label>
      <div className="dialog-actions">
        <button type="button" className="button" onClick={onClose}>
          Cancel
        </button>
        <button type="button" className="button danger" disabled={busy} onClick={() => void submit()}>
          {confirm}
        </button>
      </div>
    </Dialog>
  );
}
