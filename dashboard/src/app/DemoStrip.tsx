import { useStore } from "../store/hooks";

/** On every page, above everything: nobody may take a simulation for a measurement. */
export function DemoStrip() {
  const { address } = useStore().backend;
  return (
    <aside className="demo-strip" aria-label="Simulated data">
      <strong>Simulated data</strong>
      <span className="detail">Nothing here is measured: it comes from {address}.</span>
      <a href="?">Leave the demo</a>
    </aside>
  );
}
