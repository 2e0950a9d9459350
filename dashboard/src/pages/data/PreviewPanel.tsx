import { useEffect, useState } from "react";
import type { Preview } from "../../api/backend";
import { Panel } from "../../components/Panel";
import { useJob, useStore } from "../../store/hooks";

const ROWS = 8;

type Loaded = { status: "loading" } | { status: "failed"; message: string } | { status: "ready"; preview: Preview };

/** The first rows of the registered files, as they are. */
export function PreviewPanel({ datasetId }: { datasetId: string }) {
  const store = useStore();
  const job = useJob((data) => data.job);
  const [loaded, setLoaded] = useState<Loaded>({ status: "loading" });
  useEffect(() => {
    let current = true;
    store.backend.preview(job, datasetId, ROWS).then(
      (preview) => current && setLoaded({ status: "ready", preview }),
      (error: Error) => current && setLoaded({ status: "failed", message: error.message }),
    );
    return () => {
      current = false;
    };
  }, [store, job, datasetId]);
  return (
    <Panel title="First rows" note="read from the files" flush>
      {loaded.status === "loading" && <p className="quiet-note">Reading…</p>}
      {loaded.status === "failed" && <p className="quiet-note bad">{loaded.message}</p>}
      {loaded.status === "ready" && <Rows preview={loaded.preview} />}
    </Panel>
  );
}

function Rows({ preview }: { preview: Preview }) {
  if (preview.rows.length === 0) return <p className="quiet-note">The files have no rows.</p>;
  return (
    <section className="preview" aria-label="Rows, scrolling sideways" tabIndex={0}>
      <table>
        <thead>
          <tr>
            {preview.columns.map((column) => (
              <th key={column} scope="col">
                {column}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {preview.rows.map((row, index) => (
            // biome-ignore lint/suspicious/noArrayIndexKey: rows have nothing else that tells them apart
            <tr key={index}>
              {row.map((cell, column) => (
                <td key={preview.columns[column] ?? column} title={cell}>
                  {cell}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}
