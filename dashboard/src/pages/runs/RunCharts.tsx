import { useMemo } from "react";
import type { HistoryPoint } from "../../api/types";
import { gapOf, LineChart } from "../../charts/LineChart";
import { Panel } from "../../components/Panel";
import { figure } from "../../format/numbers";
import { useSelect } from "../../store/hooks";

const lossOf = (point: HistoryPoint) => point.loss;
const speedOf = (point: HistoryPoint) => point.steps_per_second;

/** Loss and speed of the run, side by side. */
export function RunCharts() {
  return (
    <div className="columns-1-1">
      <HistoryChart title="Loss" unit="mean loss" pick={lossOf} fit />
      <HistoryChart title="Speed" unit="steps/s" pick={speedOf} />
    </div>
  );
}

interface HistoryChartProps {
  title: string;
  unit: string;
  pick: (point: HistoryPoint) => number | null;
  fit?: boolean;
}

function HistoryChart({ title, unit, pick, fit = false }: HistoryChartProps) {
  const history = useSelect((state) => state.history);
  const points = history?.points;
  const times = useMemo(() => (points ?? []).map((point) => point.at), [points]);
  const values = useMemo(() => (points ?? []).map(pick), [points, pick]);
  const series = useMemo(() => [{ name: unit, values, tone: "accent" as const, area: !fit }], [unit, values, fit]);
  const unknown = times.length > 1 && values.every((value) => value === null);
  return (
    <Panel title={title}>
      {unknown ? (
        <p className="quiet-note">No worker reported this in the selected period.</p>
      ) : (
        <LineChart
          label={`${title} over time`}
          times={times}
          series={series}
          format={figure}
          unit={unit}
          fit={fit}
          height={200}
          gap={gapOf(history)}
        />
      )}
    </Panel>
  );
}
