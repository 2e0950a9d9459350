import { useMemo, useState } from "react";
import type { HistoryPoint } from "../../api/types";
import { type Band, gapOf, LineChart } from "../../charts/LineChart";
import { Segmented } from "../../components/controls";
import { Panel } from "../../components/Panel";
import { compact, figure, percent } from "../../format/numbers";
import { duration } from "../../format/time";
import { useSelect, useServerNow, useStore } from "../../store/hooks";

const FIGURES = {
  steps: {
    label: "Steps/s",
    name: "steps/s",
    pick: (point: HistoryPoint) => point.steps_per_second,
    unit: "steps/s",
    format: figure,
    fit: false,
  },
  samples: {
    label: "Samples/s",
    name: "samples/s",
    pick: (point: HistoryPoint) => point.samples_per_second,
    unit: "samples/s",
    format: compact,
    fit: false,
  },
  goodput: {
    label: "Goodput",
    name: "goodput",
    pick: (point: HistoryPoint) => point.goodput,
    unit: "training or saving, of 10 min",
    format: percent,
    fit: true,
  },
  loss: {
    label: "Loss",
    name: "loss",
    pick: (point: HistoryPoint) => point.loss,
    unit: "mean loss",
    format: figure,
    fit: true,
  },
} as const;
type FigureName = keyof typeof FIGURES;

const RANGES = { "300": "5 min", "900": "15 min", "3600": "1 h", "21600": "6 h" } as const;
type Range = keyof typeof RANGES;

export function ThroughputPanel() {
  const store = useStore();
  const [name, setName] = useState<FigureName>("steps");
  const [range, setRange] = useState<Range>("300");
  const history = useSelect((state) => state.history);
  const now = useServerNow(5000);
  const chosen = FIGURES[name];
  const points = useMemo(
    () => (history?.points ?? []).filter((point) => point.at >= now - Number(range)),
    [history, now, range],
  );
  const times = useMemo(() => points.map((point) => point.at), [points]);
  const series = useMemo(
    () => [{ name: chosen.name, values: points.map(chosen.pick), tone: "accent" as const, area: !chosen.fit }],
    [points, chosen],
  );
  const bands = useMemo<Band[]>(
    () =>
      (history?.recoveries ?? []).map((recovery) => {
        const to = recovery.training_at ?? now;
        return {
          from: recovery.lost_at,
          to,
          label: `${recovery.worker_id} lost: ${duration(to - recovery.lost_at)} without training`,
        };
      }),
    [history, now],
  );
  const chooseRange = (next: Range) => {
    setRange(next);
    store.setHistorySeconds(Number(next));
  };
  return (
    <Panel
      title="Throughput"
      end={
        <>
          <Segmented
            small
            label="Figure"
            value={name}
            onChange={setName}
            choices={(Object.keys(FIGURES) as FigureName[]).map((value) => ({ value, label: FIGURES[value].label }))}
          />
          <Segmented
            small
            label="Period"
            value={range}
            onChange={chooseRange}
            choices={(Object.keys(RANGES) as Range[]).map((value) => ({ value, label: RANGES[value] }))}
          />
        </>
      }
    >
      <LineChart
        label={`${chosen.label} over time`}
        times={times}
        series={series}
        format={chosen.format}
        fit={chosen.fit}
        unit={chosen.unit}
        bands={bands}
        height={264}
        gap={gapOf(history)}
      />
      {bands.length > 0 && (
        <p className="legend">
          <span>
            <i className="key band" /> a worker was lost, until training again
          </span>
        </p>
      )}
    </Panel>
  );
}
