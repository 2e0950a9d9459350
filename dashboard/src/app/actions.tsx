import { createContext, type ReactNode, useCallback, useContext, useMemo, useRef, useState } from "react";
import type { ActionRequest } from "../api/types";
import { Icon } from "../components/icons";
import { useStore } from "../store/hooks";

interface Toast {
  id: number;
  tone: "good" | "bad";
  text: string;
}

interface Actions {
  /** Asks for something and says what came of it; true when the coordinator took it. */
  ask(request: Omit<ActionRequest, "job">): Promise<boolean>;
  busy: boolean;
}

const ActionsContext = createContext<Actions>({ ask: async () => false, busy: false });
export const useActions = (): Actions => useContext(ActionsContext);

const TAKEN: Record<ActionRequest["kind"], string> = {
  checkpoint: "Checkpoint requested. The workers save it after their current step.",
  stop: "The run will stop at its next checkpoint.",
  drain: "The worker will leave after its current step.",
};
const SHOWN_MS = 6_000;

export function ActionsProvider({ children }: { children: ReactNode }) {
  const store = useStore();
  const [toasts, setToasts] = useState<Toast[]>([]);
  const [busy, setBusy] = useState(false);
  const lastId = useRef(0);

  const tell = useCallback((tone: Toast["tone"], text: string) => {
    lastId.current += 1;
    const id = lastId.current;
    setToasts((shown) => [...shown, { id, tone, text }].slice(-3));
    window.setTimeout(() => setToasts((shown) => shown.filter((toast) => toast.id !== id)), SHOWN_MS);
  }, []);

  const ask = useCallback(
    async (request: Omit<ActionRequest, "job">) => {
      setBusy(true);
      try {
        await store.backend.act({ job: store.getState().data?.job ?? "", ...request });
        tell("good", TAKEN[request.kind]);
        return true;
      } catch (error) {
        tell("bad", error instanceof Error ? error.message : String(error));
        return false;
      } finally {
        setBusy(false);
      }
    },
    [store, tell],
  );

  const value = useMemo(() => ({ ask, busy }), [ask, busy]);
  return (
    <ActionsContext.Provider value={value}>
      {children}
      <div className="toasts" role="status" aria-live="polite">
        {toasts.map((toast) => (
          <div key={toast.id} className="toast">
            <span className={toast.tone}>
              <Icon name={toast.tone === "good" ? "check" : "alert"} />
            </span>
            <span>{toast.text}</span>
          </div>
        ))}
      </div>
    </ActionsContext.Provider>
  );
}
