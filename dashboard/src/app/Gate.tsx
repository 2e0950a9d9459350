import type { ReactNode } from "react";
import { EmptyState } from "../components/Panel";
import { useSelect, useStore } from "../store/hooks";
import { Countdown } from "./ConnectionBanner";

export const DEMO_HREF = "?demo=1#/overview";

/** Shows the page once there is data; until then what is going on, and what to run. */
export function Gate({ children }: { children: ReactNode }) {
  const hasData = useSelect((state) => state.data !== null);
  const link = useSelect((state) => state.link);
  if (hasData) return children;
  return link.status === "disconnected" ? <Unreachable message={link.message} retryAt={link.retryAt} /> : <Loading />;
}

function Loading() {
  return (
    <div className="loading" role="status" aria-label="Loading">
      <div className="skeleton" style={{ height: 36, width: 220 }} />
      <div className="skeleton" style={{ height: 128 }} />
      <div className="skeleton-row">
        <div className="skeleton" style={{ height: 280 }} />
        <div className="skeleton" style={{ height: 280 }} />
      </div>
    </div>
  );
}

function Unreachable({ message, retryAt }: { message: string; retryAt: number }) {
  const store = useStore();
  return (
    <EmptyState
      title="The coordinator is not responding"
      commands={["strata coordinator 0.0.0.0:50051 --data-dir ./strata-data"]}
      actions={
        <>
          <button type="button" className="button primary" onClick={() => store.retryNow()}>
            Try now
          </button>
          <a className="button" href={DEMO_HREF}>
            Explore with simulated data
          </a>
        </>
      }
    >
      No response from <span className="mono">{store.backend.address}</span> ({message}). Start a coordinator, and this
      page connects by itself. <Countdown until={retryAt} />
    </EmptyState>
  );
}

/** An address that listens everywhere, as others can reach it: by the name this page was reached. */
export function reachable(address: string, host: string = window.location.hostname): string {
  return address.replace(/^(0\.0\.0\.0|\[::\]|::)(?=:\d+$)/, host || "127.0.0.1");
}

/** Where a page would show workers and none has ever joined. */
export function NoWorkers() {
  const grpc = reachable(useSelect((state) => state.data?.coordinator.grpc_address ?? "127.0.0.1:50051"));
  const simulated = useStore().backend.simulated;
  return (
    <EmptyState
      title="No worker has joined yet"
      commands={[`COORDINATOR_URL=${grpc} torchrun --nproc-per-node 4 train.py`, "strata demo"]}
      actions={
        simulated ? undefined : (
          <a className="button" href={DEMO_HREF}>
            Explore with simulated data
          </a>
        )
      }
    >
      The coordinator is running at <span className="mono">{grpc}</span>. Start your training as you always do, with its
      address in COORDINATOR_URL; or run the demo, which trains a small model with four workers.
    </EmptyState>
  );
}
