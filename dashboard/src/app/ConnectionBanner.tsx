import { useEffect, useState } from "react";
import { ago } from "../format/time";
import { useSelect, useStore } from "../store/hooks";

/** Time as it passes, even while the data's own clock stands still. */
function useTicking(): number {
  const [now, setNow] = useState(Date.now);
  useEffect(() => {
    const timer = window.setInterval(() => setNow(Date.now()), 250);
    return () => window.clearInterval(timer);
  }, []);
  return now;
}

export function Countdown({ until }: { until: number }) {
  const left = Math.ceil((until - useTicking()) / 1000);
  return <span className="num">{left > 0 ? `Trying again in ${left} s.` : "Trying now…"}</span>;
}

function DataAge({ since }: { since: number }) {
  const now = useTicking();
  return <span className="num">What you see is from {ago(since / 1000, now / 1000)}.</span>;
}

/** Above every page while the coordinator is away. */
export function ConnectionBanner() {
  const store = useStore();
  const link = useSelect((state) => state.link);
  const receivedAt = useSelect((state) => state.receivedAt);
  const hasData = useSelect((state) => state.data !== null);
  if (link.status !== "disconnected" || !hasData) return null;
  return (
    <div className="banner" role="alert">
      <strong>Connection lost</strong>
      <span aria-hidden="true">
        {receivedAt !== null && <DataAge since={receivedAt} />} <Countdown until={link.retryAt} />
      </span>
      <span className="visually-hidden">{link.message}. It is tried again by itself.</span>
      <button type="button" className="button small" onClick={() => store.retryNow()}>
        Try now
      </button>
    </div>
  );
}
