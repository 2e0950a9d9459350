import { createContext, useContext, useSyncExternalStore } from "react";
import type { JobState, State } from "./state";
import type { Store } from "./store";
import { neverTicks, ticker } from "./ticker";

const StoreContext = createContext<Store | null>(null);
export const StoreProvider = StoreContext.Provider;

export function useStore(): Store {
  const store = useContext(StoreContext);
  if (!store) throw new Error("no StoreProvider above this component");
  return store;
}

/** A part of the state; `select` must give the same object while nothing changed. */
export function useSelect<T>(select: (state: State) => T): T {
  const store = useStore();
  return useSyncExternalStore(store.subscribe, () => select(store.getState()));
}

/** A part of the job's data. Pages are only shown once there is some. */
export function useJob<T>(select: (data: JobState) => T): T {
  return useSelect((state) => {
    if (!state.data) throw new Error("no data yet");
    return select(state.data);
  });
}

export const isStale = (state: State): boolean => state.link.status === "disconnected";

/** The browser's clock, ticking; it stands still at the last data while disconnected, so that ages do not lie. */
export function useNow(everyMs = 1000): number {
  const frozenAt = useSelect((state) => (isStale(state) ? state.receivedAt : null));
  const clock = ticker(everyMs);
  const now = useSyncExternalStore(frozenAt === null ? clock.subscribe : neverTicks, clock.read);
  return frozenAt ?? now;
}

/** The coordinator's clock in seconds, ticking. */
export function useServerNow(everyMs = 1000): number {
  const now = useNow(everyMs);
  const offset = useSelect((state) => state.clockOffset);
  return (now + offset) / 1000;
}
