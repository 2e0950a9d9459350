import type { Coverage } from "../../api/types";
import { Panel } from "../../components/Panel";
import { count, percent } from "../../format/numbers";
import { coverageVerdict, hasEnded } from "./coverageWords";

/** So many epochs are told in full; older ones, when they are good, in a line. */
const IN_FULL = 2;

export function CoveragePanel({ coverage }: { coverage: Coverage[] }) {
  const newest = [...coverage].sort((a, b) => b.epoch - a.epoch);
  return (
    <Panel title="Coverage" note="what was really handed out, epoch by epoch">
      {newest.length === 0 ? (
        <p className="quiet-note">
          Loaders report what they handed out at the end of an epoch, and at commit(). Nothing has been reported yet.
        </p>
      ) : (
        <ol className="coverage">
          {newest.map((entry, index) => (
            <Epoch
              key={entry.epoch}
              coverage={entry}
              brief={index >= IN_FULL && coverageVerdict(entry).tone === "good"}
            />
          ))}
        </ol>
      )}
    </Panel>
  );
}

function Epoch({ coverage, brief }: { coverage: Coverage; brief: boolean }) {
  const verdict = coverageVerdict(coverage);
  const share = (samples: number) => `${coverage.total ? (samples / coverage.total) * 100 : 0}%`;
  return (
    <li>
      <div className="coverage-head">
        <span className="muted num">Epoch {coverage.epoch}</span>
        <b className={verdict.tone}>{verdict.title}</b>
        <span className="num muted coverage-share">
          {percent(coverage.total ? coverage.covered / coverage.total : null)}
        </span>
      </div>
      <div
        className="coverage-bar"
        role="img"
        aria-label={`${count(coverage.covered)} covered, ${count(coverage.missing)} missing, ${count(coverage.repeated)} repeated`}
      >
        <i className={hasEnded(coverage) ? "covered" : "covered going"} style={{ width: share(coverage.covered) }} />
        {hasEnded(coverage) && <i className="missing" style={{ width: share(coverage.missing) }} />}
        <i className="repeated" style={{ width: share(coverage.repeated) }} />
      </div>
      {!brief && <p className="soft">{verdict.text}</p>}
      {!brief && (
        <dl className="counts num">
          <div>
            <dt>covered</dt>
            <dd>{count(coverage.covered)}</dd>
          </div>
          <div>
            <dt>{hasEnded(coverage) ? "missing" : "to come"}</dt>
            <dd className={hasEnded(coverage) && coverage.missing ? "bad" : ""}>{count(coverage.missing)}</dd>
          </div>
          <div>
            <dt>repeated</dt>
            <dd>{count(coverage.repeated)}</dd>
          </div>
        </dl>
      )}
    </li>
  );
}
