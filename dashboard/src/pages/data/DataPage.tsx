import type { Dataset } from "../../api/types";
import { navigate } from "../../app/router";
import { useFormat } from "../../app/settings";
import { ColumnChart } from "../../charts/ColumnChart";
import { Chip } from "../../components/controls";
import { EmptyState, Facts, PageHead, Panel } from "../../components/Panel";
import { count, percent, plural } from "../../format/numbers";
import { ago } from "../../format/time";
import { useJob, useServerNow } from "../../store/hooks";
import { CoveragePanel } from "./CoveragePanel";
import { balanceWords } from "./coverageWords";

export function DataPage({ datasetId }: { datasetId: string | undefined }) {
  const datasets = useJob((data) => data.datasets);
  const dataset = datasets.find((entry) => entry.dataset_id === datasetId) ?? datasets[0];
  if (!dataset) {
    return (
      <>
        <PageHead title="Data" />
        <EmptyState
          title="No datasets yet"
          commands={["strata datasets register train ./data/train --format parquet"]}
          code={'DatasetRegistry().register("train", "data/train", "parquet")'}
        >
          Register one from a shell or in the training loop. This page then shows who reads which part, and proof that
          every sample is read once.
        </EmptyState>
      </>
    );
  }
  return (
    <>
      <PageHead title="Data" summary={plural(datasets.length, "dataset")} />
      {datasets.length > 1 && (
        <div className="chips" role="group" aria-label="Dataset">
          {datasets.map((entry) => (
            <Chip
              key={entry.dataset_id}
              pressed={entry === dataset}
              onClick={() => navigate(["data", entry.dataset_id])}
            >
              {entry.dataset_id} <span className="num">{count(entry.total_samples)}</span>
            </Chip>
          ))}
        </div>
      )}
      <div className="columns-1-2">
        <DatasetFacts dataset={dataset} />
        <CoveragePanel coverage={dataset.coverage} />
      </div>
      <DistributionPanel dataset={dataset} />
    </>
  );
}

function DatasetFacts({ dataset }: { dataset: Dataset }) {
  const format = useFormat();
  const now = useServerNow();
  return (
    <Panel title={dataset.dataset_id} note={dataset.format}>
      <Facts
        items={[
          [
            "Path",
            <span key="p" className="mono break">
              {dataset.path}
            </span>,
          ],
          ["Samples", count(dataset.total_samples)],
          ["Shards", `${count(dataset.shard_count)} × ${count(dataset.shard_size)} samples`],
          ["Size", format.bytes(dataset.total_bytes)],
          ["Order", dataset.shuffle ? `shuffled, seed ${dataset.seed}` : "as in the files"],
          [
            "Registered",
            <span key="r" title={format.dateTime(dataset.registered_at)}>
              {ago(dataset.registered_at, now)}
            </span>,
          ],
        ]}
      />
    </Panel>
  );
}

function DistributionPanel({ dataset }: { dataset: Dataset }) {
  const now = useServerNow();
  const ranks = dataset.shards_per_rank;
  const change = dataset.last_change;
  const most = Math.max(...ranks.map((share) => share.shards));
  const uneven = ranks.some((share) => most - share.shards > 1);
  return (
    <Panel title="Shards per rank" note={balanceWords(ranks.map((share) => share.shards))}>
      {ranks.length === 0 ? (
        <p className="quiet-note">
          {dataset.coverage.length > 0
            ? "No rank has shards of its own: in global order the ranks share every batch."
            : "Shards are assigned when the first worker asks for its own."}
        </p>
      ) : (
        <ColumnChart
          label="Shards per rank"
          columns={ranks.map((share) => ({
            name: String(share.rank),
            value: share.shards,
            marked: uneven && share.shards === most,
          }))}
          format={count}
          axisTitle="rank"
          height={220}
          describe={(column, index) => (
            <>
              <b>rank {column.name}</b>
              <span className="num">{plural(column.value, "shard")}</span>
              <span className="num muted">{plural(ranks[index]?.samples ?? 0, "sample")}</span>
            </>
          )}
        />
      )}
      <p className="movement soft">
        {change ? (
          <>
            Last change, {ago(change.at, now)}: {change.reason || "membership changed"}.{" "}
            <b className="num">{plural(change.moved_shards, "shard")}</b> of {count(dataset.shard_count)} moved (
            {percent(dataset.shard_count ? change.moved_shards / dataset.shard_count : null)}),{" "}
            {plural(change.moved_samples, "sample")}. The rest stayed where it was.
          </>
        ) : (
          ranks.length > 0 && "No shard has moved: membership has not changed since the shards were assigned."
        )}
        {ranks.length >= 1024 && " The first 1,024 ranks are shown."}
      </p>
    </Panel>
  );
}
