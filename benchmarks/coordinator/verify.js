// Sends one operation through the .proto and checks the status and the fields of every reply.
// PLAN names a JSON file: address, proto folder, operation, vus, iterations, and what to expect.
import grpc from 'k6/net/grpc';
import exec from 'k6/execution';
import { Counter } from 'k6/metrics';

const plan = JSON.parse(open(__ENV.PLAN));
const verified = new Counter('verified');
const failed = new Counter('failed');
const client = new grpc.Client();
client.load([plan.protos], 'coordinator.proto');

export const options = {
  scenarios: {
    verification: {
      executor: 'per-vu-iterations',
      vus: plan.vus,
      iterations: plan.iterations,
      maxDuration: '300s',
    },
  },
};

let connected = false;
let lastRound = 0;

const operations = {
  heartbeat: {
    method: 'Heartbeat',
    request: () => plan.request,
    good: (m) => Number(m.generation) === plan.generation && m.liveWorkers === plan.liveWorkers,
  },
  shard: {
    method: 'GetDataShard',
    request: () => Object.assign({}, plan.request, { index: shardIndex() }),
    good: (m) => {
      const expected = plan.shards[shardIndex()];
      return (m.shardId || 0) === expected.shardId
        && Number(m.startSample || 0) === expected.startSample
        && Number(m.endSample) === expected.endSample
        && m.shardCount === plan.shards.length;
    },
  },
  registration: {
    method: 'RegisterWorker',
    request: () => plan.request,
    good: (m) => m.workerId === `worker-${m.rank || 0}`
      && Number(m.incarnation) > 0
      && Number(m.generation) > 0
      && m.job === plan.request.job,
  },
  barrier: {
    method: 'WaitBarrier',
    request: () => plan.arrivals[exec.vu.idInTest - 1],
    good: (m) => {
      const isNext = Number(m.round) === lastRound + 1;
      lastRound = Number(m.round);
      return isNext
        && m.outcome === 'BARRIER_OUTCOME_COMPLETED'
        && m.participants === plan.arrivals.length;
    },
  },
};
const operation = operations[plan.operation];

function shardIndex() {
  return (exec.vu.idInTest + exec.vu.iterationInInstance) % plan.shards.length;
}

export default function () {
  if (!connected) {
    client.connect(plan.address, { plaintext: true, timeout: '60s' });
    connected = true;
  }
  const reply = client.invoke(
    `${plan.service}/${operation.method}`, operation.request(), { timeout: '120s' },
  );
  const good = reply.status === grpc.StatusOK && operation.good(reply.message);
  (good ? verified : failed).add(1);
  if (!good) {
    console.error(`${operation.method}: ${JSON.stringify(reply)}`);
  }
}

export function handleSummary(data) {
  const count = (name) => (data.metrics[name] ? data.metrics[name].values.count : 0);
  return { [plan.summary]: JSON.stringify({ verified: count('verified'), failed: count('failed') }) };
}
