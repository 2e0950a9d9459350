"""Environment variables that Strata, its launchers and gRPC read."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from ...client import WorkerConfig
from ...config import DEFAULT_URL, ENVIRONMENT, FILE_VARIABLE, Config, split_address
from ...errors import ConfigError
from .finding import Finding

VARIABLES_GROUP = "environment"
VARIABLES = frozenset(
    {name for name in ENVIRONMENT if name.startswith("STRATA_")}
    | {
        "STRATA_ATTEMPT",
        FILE_VARIABLE,
        "STRATA_CACHE_DIR",
        "STRATA_CONNECT_TIMEOUT_MS",
        "STRATA_JOB",
        "STRATA_LOG",
        "STRATA_LOG_FORMAT",
        "STRATA_PREEMPTION_FILE",
        "STRATA_WORLD_SIZE",
    }
)
"""Every variable of our own that is read anywhere."""
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy")


def check_variables(environment: Mapping[str, str], url: str) -> Iterator[Finding]:
    """Everything that is set and read; ``url`` is the coordinator in question."""
    yield _coordinator_url(environment)
    yield _worker(environment)
    yield _configuration(environment)
    yield from _unknown(environment)
    yield _proxy(environment, url)


def _coordinator_url(environment: Mapping[str, str]) -> Finding:
    name = "COORDINATOR_URL"
    url = environment.get(name)
    if not url:
        return Finding(VARIABLES_GROUP, name, "ok", f"not set; the default is {DEFAULT_URL}")
    try:
        WorkerConfig(coordinator_url=url)
    except ConfigError as exc:
        return Finding(VARIABLES_GROUP, name, "fail", str(exc), f"export {name}=http://HOST:50051")
    return Finding(VARIABLES_GROUP, name, "ok", url)


def _worker(environment: Mapping[str, str]) -> Finding:
    """RANK, WORLD_SIZE and the others, taken together as a worker takes them."""
    name = "RANK, WORLD_SIZE"
    others = {key: value for key, value in environment.items() if key != "COORDINATOR_URL"}
    try:
        config = WorkerConfig().resolved(others)
    except ValueError as exc:
        remedy = "set them as your launcher does: RANK from 0 to WORLD_SIZE - 1, WORKER_ID unique"
        return Finding(VARIABLES_GROUP, name, "fail", str(exc), remedy)
    if config.rank is None and config.world_size is None:
        text = "not set: workers get the lowest free rank of an elastic job"
        return Finding(VARIABLES_GROUP, name, "ok", text)
    if config.world_size is None:
        text = f"RANK is {config.rank}, but WORLD_SIZE is not set: the job is elastic"
        return Finding(VARIABLES_GROUP, name, "warn", text, "set both, or neither")
    rank = "any" if config.rank is None else config.rank
    return Finding(VARIABLES_GROUP, name, "ok", f"rank {rank} of {config.world_size}")


def _configuration(environment: Mapping[str, str]) -> Finding:
    name = "configuration"
    known = (FILE_VARIABLE, *ENVIRONMENT)
    given = sorted(variable for variable in known if environment.get(variable))
    try:
        Config.load(environment=environment)
    except ConfigError as exc:
        return Finding(
            VARIABLES_GROUP, name, "fail", str(exc), "correct the variable or the file, or unset it"
        )
    text = f"from {', '.join(given)}" if given else "no variable changes it"
    return Finding(VARIABLES_GROUP, name, "ok", text)


def _unknown(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name in sorted(environment):
        if name.startswith("STRATA_") and name not in VARIABLES:
            near = difflib.get_close_matches(name, sorted(VARIABLES), n=1, cutoff=0.4)
            remedy = f"did you mean {near[0]}? Else unset it" if near else "unset it"
            yield Finding(VARIABLES_GROUP, name, "warn", "is set, but nothing reads it", remedy)


def _proxy(environment: Mapping[str, str], url: str) -> Finding:
    """GRPC sends calls to a proxy where the environment names one, also for private hosts."""
    proxy = next((name for name in _PROXIES if environment.get(name)), None)
    if proxy is None:
        return Finding(VARIABLES_GROUP, "proxy", "ok", "none: calls go straight to the coordinator")
    try:
        host, _ = split_address(url)
    except ConfigError:
        host = ""
    excepted = next((environment[name] for name in _EXCEPTIONS if environment.get(name)), "")
    if any(host.endswith(entry.strip()) for entry in excepted.split(",") if entry.strip()):
        return Finding(
            VARIABLES_GROUP, "proxy", "ok", f"{proxy} is set, with an exception for {host}"
        )
    text = f"{proxy} sends calls for {host or 'the coordinator'} to {environment[proxy]}"
    return Finding(VARIABLES_GROUP, "proxy", "warn", text, f"export no_grpc_proxy={host or 'HOST'}")
