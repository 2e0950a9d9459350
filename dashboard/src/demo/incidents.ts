import type { Recovery } from "../api/types";
import { type Member, TIMEOUT_SECONDS } from "./fleet";
import type { Simulation } from "./simulation";

interface Incident {
  member: Member;
  lostAt: number;
  detectedAt: number | null;
  replaceAt: number;
  recovery: Recovery | null;
}

/** The first few keep their names, so that links to them stay good. */
const NEVER_LOST = 8;

/** Every minute or so a worker falls silent, is declared dead, and is replaced; some are slow for a while. */
export class Incidents {
  readonly recoveries: Recovery[] = [];
  private current: Incident | null = null;
  private nextLossAt: number;
  private nextSlowAt: number;
  private spares = 0;

  constructor(private readonly sim: Simulation) {
    this.nextLossAt = sim.now + 65;
    this.nextSlowAt = sim.now + 30;
  }

  /** Who has died and is missed by the others. */
  get lost(): Member | null {
    return this.current?.member ?? null;
  }

  play(): void {
    this.slowSomebody();
    const { current, sim } = this;
    if (!current) {
      if (sim.now >= this.nextLossAt && sim.phase === "training") this.loseSomebody();
    } else if (current.detectedAt === null) {
      if (sim.now - current.member.heardAt >= TIMEOUT_SECONDS) this.detect(current);
    } else if (sim.now >= current.replaceAt) {
      this.replace(current);
    }
  }

  private slowSomebody(): void {
    const { sim } = this;
    if (sim.now < this.nextSlowAt) return;
    const live = sim.live();
    const member = live[sim.random.integer(live.length)];
    this.nextSlowAt = sim.now + sim.random.between(70, 170);
    if (!member || member.silent) return;
    member.slowUntil = sim.now + sim.random.between(12, 30);
    const { worker_id, rank } = member.row;
    const message = `${worker_id} takes 1.7 times the median step`;
    sim.log("warning", "worker.straggling", message, { worker: worker_id, rank: String(rank) });
  }

  private loseSomebody(): void {
    const { sim } = this;
    const live = sim.live();
    const spared = live.length > 2 * NEVER_LOST ? NEVER_LOST : 1;
    const member = live[spared + sim.random.integer(live.length - spared)];
    if (!member) return;
    member.silent = true;
    this.current = { member, lostAt: sim.now, detectedAt: null, replaceAt: 0, recovery: null };
  }

  private detect(incident: Incident): void {
    const { sim } = this;
    const { row } = incident.member;
    const reason = `no heartbeat for ${TIMEOUT_SECONDS}.0 s`;
    incident.detectedAt = sim.now;
    incident.replaceAt = sim.now + sim.random.between(3, 9);
    incident.recovery = { lost_at: incident.lostAt, detected_at: sim.now, training_at: null, worker_id: row.worker_id };
    this.recoveries.push(incident.recovery);
    incident.member.row = { ...row, membership: "dead", detail: reason };
    sim.phase = "recovering";
    sim.changeMembership(`${row.worker_id} was lost`, row.worker_id);
    const fields = { worker: row.worker_id, rank: String(row.rank), generation: String(sim.generation) };
    sim.log("error", "worker.dead", `${row.worker_id} (rank ${row.rank}) is dead: ${reason}`, fields);
    for (const open of sim.barriers.open) {
      const message = `${open.barrier_id} ended: ${row.worker_id} was lost`;
      sim.log("warning", "barrier.failed", message, { barrier: open.barrier_id, worker: row.worker_id });
    }
    sim.barriers.open = [];
  }

  private replace(incident: Incident): void {
    const { sim } = this;
    const { row } = incident.member;
    const bySpare = sim.random.next() < 0.4;
    const workerId = bySpare ? `spare-${this.spares}` : row.worker_id;
    if (bySpare) {
      this.spares += 1;
      sim.forget(row.worker_id);
    }
    sim.join(workerId, row.rank, row.incarnation + 1, sim.now);
    sim.changeMembership(`${workerId} took rank ${row.rank}`, workerId);
    const fields = { worker: workerId, rank: String(row.rank), generation: String(sim.generation) };
    sim.log(
      "info",
      "worker.registered",
      `${workerId} joined as rank ${row.rank}, generation ${sim.generation}`,
      fields,
    );
    this.closeRecovery(incident);
    this.current = null;
    sim.phase = "training";
    this.nextLossAt = sim.now + sim.random.between(55, 110);
  }

  private closeRecovery(incident: Incident): void {
    const { sim } = this;
    if (!incident.recovery) return;
    const index = this.recoveries.indexOf(incident.recovery);
    this.recoveries[index] = { ...incident.recovery, training_at: sim.now };
    const seconds = (sim.now - incident.lostAt).toFixed(1);
    sim.log("info", "run.recovered", `training again ${seconds} s after the loss`, { seconds });
  }
}
