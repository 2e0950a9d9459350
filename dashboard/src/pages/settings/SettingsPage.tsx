import { DEMO_HREF } from "../../app/Gate";
import { linkWords } from "../../app/Header";
import { type Settings, useFormat, useSettings } from "../../app/settings";
import { ShortcutList } from "../../app/shortcuts";
import { Segmented } from "../../components/controls";
import { Facts, PageHead, Panel } from "../../components/Panel";
import { count, figure } from "../../format/numbers";
import { ago, duration } from "../../format/time";
import { useSelect, useServerNow, useStore } from "../../store/hooks";

export function SettingsPage() {
  return (
    <>
      <PageHead title="Settings" />
      <div className="columns-1-1">
        <Choices />
        <ConnectionFacts />
      </div>
      <div className="columns-1-1">
        <CoordinatorFacts />
        <Panel title="Keyboard">
          <ShortcutList />
        </Panel>
      </div>
    </>
  );
}

interface ChoiceRowProps<K extends keyof Settings> {
  name: K;
  title: string;
  note: string;
  choices: [Settings[K], string][];
}

function ChoiceRow<K extends keyof Settings>({ name, title, note, choices }: ChoiceRowProps<K>) {
  const settings = useSettings();
  return (
    <div className="setting">
      <div>
        <b>{title}</b>
        <p className="muted">{note}</p>
      </div>
      <Segmented<Settings[K]>
        label={title}
        value={settings[name]}
        onChange={(value) => settings.change({ [name]: value })}
        choices={choices.map(([value, label]) => ({ value, label }))}
      />
    </div>
  );
}

function Choices() {
  return (
    <Panel title="Preferences" note="kept in this browser">
      <div className="settings">
        <ChoiceRow
          name="theme"
          title="Theme"
          note="System follows your device."
          choices={[
            ["system", "System"],
            ["light", "Light"],
            ["dark", "Dark"],
          ]}
        />
        <ChoiceRow
          name="refresh"
          title="Refresh"
          note="Live streams changes, twice a second at most."
          choices={[
            ["live", "Live"],
            ["poll-2", "2 s"],
            ["poll-10", "10 s"],
            ["paused", "Paused"],
          ]}
        />
        <ChoiceRow
          name="units"
          title="Sizes"
          note="GiB counts in 1,024, GB in 1,000."
          choices={[
            ["binary", "GiB"],
            ["decimal", "GB"],
          ]}
        />
        <ChoiceRow
          name="zone"
          title="Clock"
          note="How times of day are written."
          choices={[
            ["local", "Local"],
            ["utc", "UTC"],
          ]}
        />
      </div>
    </Panel>
  );
}

function ConnectionFacts() {
  const { backend } = useStore();
  const link = useSelect((state) => state.link);
  const receivedAt = useSelect((state) => state.receivedAt);
  const offset = useSelect((state) => state.clockOffset);
  const now = useServerNow();
  const { refresh } = useSettings();
  const { text, dot } = linkWords(link, refresh);
  return (
    <Panel
      title="Connection"
      end={
        backend.simulated ? (
          <a className="link" href="?">
            Leave the demo
          </a>
        ) : (
          <a className="link" href={DEMO_HREF}>
            Simulated data
          </a>
        )
      }
    >
      <Facts
        items={[
          [
            "State",
            <span key="s" className="inline-dot">
              <i className={`dot ${dot}`} /> {text}
            </span>,
          ],
          [
            "Data from",
            <span key="a" className={backend.simulated ? "" : "mono break"}>
              {backend.address}
            </span>,
          ],
          ["By", link.status === "connected" ? (link.via === "stream" ? "server-sent events" : "polling") : "—"],
          ["Last data", receivedAt === null ? "—" : ago((receivedAt + offset) / 1000, now)],
          ["Clock difference", receivedAt === null ? "—" : duration(Math.abs(offset) / 1000)],
          ...(link.status === "disconnected" ? ([["Problem", link.message]] as [string, string][]) : []),
        ]}
      />
    </Panel>
  );
}

function CoordinatorFacts() {
  const coordinator = useSelect((state) => state.data?.coordinator);
  const format = useFormat();
  const now = useServerNow();
  if (!coordinator) {
    return (
      <Panel title="Coordinator">
        <p className="quiet-note">Not connected.</p>
      </Panel>
    );
  }
  return (
    <Panel title="Coordinator">
      <Facts
        items={[
          ["Version", coordinator.version],
          [
            "gRPC",
            <span key="g" className="mono">
              {coordinator.grpc_address}
            </span>,
          ],
          [
            "HTTP",
            <span key="h" className="mono">
              {coordinator.http_address}
            </span>,
          ],
          ["Transport", coordinator.transport],
          ["Up for", duration(Math.floor(Math.max(0, now - coordinator.started_at)))],
          ["Requests", `${count(coordinator.requests_total)}, ${figure(coordinator.requests_per_second)}/s`],
          ["Errors", count(coordinator.errors_total)],
          [
            "Event loop lag",
            coordinator.event_loop_lag_ms === null ? "—" : `${figure(coordinator.event_loop_lag_ms)} ms`,
          ],
          ["Memory", format.bytes(coordinator.memory_bytes)],
          [
            "Heartbeats",
            `every ${duration(coordinator.heartbeat_interval_ms / 1000)}, dead after ${duration(coordinator.heartbeat_timeout_ms / 1000)}`,
          ],
        ]}
      />
    </Panel>
  );
}
