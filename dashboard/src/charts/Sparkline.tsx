import { memo } from "react";
import { areaPath, linear, linePath } from "./scales";

const WIDTH = 120;
const HEIGHT = 28;

/** The shape of a figure over time; the figure itself stands beside it. */
export const Sparkline = memo(function Sparkline({ values }: { values: (number | null)[] }) {
  const known = values.filter((value): value is number => value !== null);
  if (known.length < 2) return <div className="sparkline empty" aria-hidden="true" />;
  const high = Math.max(...known);
  const low = Math.min(...known);
  // A flat line lies low, and small wobbles do not look like mountains.
  const spread = Math.max(high - low, Math.abs(high) * 0.08, 1e-9);
  const y = linear(low, low + spread, HEIGHT - 3, 3);
  const x = linear(0, values.length - 1, 0, WIDTH);
  const xs = values.map((_, index) => x(index));
  const ys = values.map((value) => (value === null ? null : y(value)));
  return (
    <svg className="sparkline" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
      <path className="spark-area" d={areaPath(xs, ys, HEIGHT)} />
      <path className="spark-line" d={linePath(xs, ys)} vectorEffect="non-scaling-stroke" />
    </svg>
  );
});
