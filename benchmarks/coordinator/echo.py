"""A server that answers Heartbeat and does nothing else: the ceiling of a transport.

Run as a process of its own; it prints the port it listens on.
"""

from __future__ import annotations

import argparse
import asyncio

import grpc

from dtruntime.rpc.gen import coordinator_pb2 as pb

from .messages import SERVICE

GENERATION = 1
TRANSPORTS = ("pygrpc-native", "grpc.aio")


async def heartbeat(request: pb.HeartbeatRequest, context: object) -> pb.HeartbeatResponse:
    """Parse, build, return."""
    return pb.HeartbeatResponse(generation=GENERATION)


def new_server(transport: str) -> grpc.aio.Server:
    """A server of the given kind, with the library's defaults."""
    if transport == "grpc.aio":
        return grpc.aio.server()
    import pygrpc_native.aio

    server: grpc.aio.Server = pygrpc_native.aio.server()
    return server


async def serve(transport: str) -> None:
    """Serve on a free port until the process is ended."""
    server = new_server(transport)
    handler = grpc.unary_unary_rpc_method_handler(
        heartbeat,
        request_deserializer=pb.HeartbeatRequest.FromString,
        response_serializer=pb.HeartbeatResponse.SerializeToString,
    )
    server.add_registered_method_handlers(SERVICE, {"Heartbeat": handler})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", choices=TRANSPORTS, required=True)
    transport = parser.parse_args().transport
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(transport))
    else:
        uvloop.run(serve(transport))  # as the coordinator does


if __name__ == "__main__":
    main()
