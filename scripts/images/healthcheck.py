"""Ask the coordinator of this container whether it serves, by the standard gRPC health service.

The exit status is 0 when it does. Kubernetes asks the same by itself.
"""

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SECONDS = 4.0


def is_serving(port: int) -> bool:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = health_pb2.HealthCheckRequest()
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=SECONDS)  # type: ignore[attr-defined]
        except grpc.RpcError as error:
            print(error.code().name, file=sys.stderr)
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    address = os.environ.get("STRATA_ADDRESS", "0.0.0.0:50051")
    sys.exit(0 if is_serving(int(address.rpartition(":")[2])) else 1)
