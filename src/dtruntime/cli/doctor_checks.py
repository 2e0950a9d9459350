"""The checks of ``strata doctor``: software, environment, the coordinator, this machine."""

from __future__ import annotations

import difflib
import os
import platform
import re
import resource
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from .._version import __version__
from ..client import Observer, WorkerConfig
from ..config import DEFAULT_URL, ENVIRONMENT, FILE_VARIABLE, Config, split_address
from ..display import count, duration, size
from ..errors import ConfigError, ConnectionError
from ..rpc.channel import target_of

Verdict = Literal["ok", "note", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True):
    """What a check found, and what to do about it.

    A ``note`` is about something that may not be needed here.
    """

    group: str
    name: str
    verdict: Verdict
    text: str
    remedy: str = ""
    measured: Mapping[str, float] = {}
    """Numbers behind the text, each named with its unit."""


_software = partial(Finding, "software")
_environment = partial(Finding, "environment")
_coordinator = partial(Finding, "coordinator")
_machine = partial(Finding, "this machine")


DISTRIBUTION = "dtruntime"
OLDEST_PYTHON = (3, 11)
_NVIDIA = Path("/proc/driver/nvidia/version")
_BOUND = re.compile(r"(>=|<)\s*([0-9.]+)")


@dataclass(frozen=True, slots=True)
class OptionalPackage:
    """A package that Strata can run without, and what is lost then."""

    name: str
    extra: str
    """The extra that brings it; empty: it is installed with Strata, unless that was slimmed."""
    cost: str
    verdict: Verdict = "warn"


OPTIONAL = (
    OptionalPackage(
        "pygrpc-native", "fast", "a coordinator here serves far fewer requests per second"
    ),
    OptionalPackage("uvloop", "fast", "a coordinator here runs on asyncio's slower event loop"),
    OptionalPackage("pyarrow", "", "no data files can be read, and there is no strata demo"),
    OptionalPackage("obstore", "", "nothing in s3://, gs:// and az:// can be read or saved"),
    OptionalPackage("google-crc32c", "", "no tfrecord files can be read"),
    OptionalPackage("torch", "torch", "no torch integration", "note"),
    OptionalPackage("jax", "jax", "no JAX integration", "note"),
)
NVML = "nvidia-ml-py"


def check_packages() -> Iterator[Finding]:
    """Versions, required and optional."""
    yield _python()
    yield _strata()
    yield from _required()
    gpu_here = _NVIDIA.exists()
    cost = "no GPU usage in strata status" if gpu_here else "nothing lost, no NVIDIA driver here"
    nvml = OptionalPackage(NVML, "gpu", cost, "warn" if gpu_here else "note")
    for package in (*OPTIONAL, nvml):
        yield _optional(package)


def _python() -> Finding:
    version = platform.python_version()
    if sys.version_info >= OLDEST_PYTHON:
        return _software("Python", "ok", f"{version}, {sys.executable}")
    needed = ".".join(map(str, OLDEST_PYTHON))
    remedy = f"install Python {needed} or newer and a virtual environment with it"
    return _software("Python", "fail", f"{version} is older than {needed}", remedy)


def _strata() -> Finding:
    installed = _version(DISTRIBUTION)
    if installed is None:
        text = f"{__version__}, used from its sources without being installed"
        return _software("strata", "note", text)
    if installed != __version__:
        text = f"the code is {__version__}, but {installed} is installed"
        return _software("strata", "warn", text, "pip install --force-reinstall dtruntime")
    return _software("strata", "ok", __version__)


def _required() -> Iterator[Finding]:
    """One finding for all that are fine, and one for each that is not."""
    good = []
    slimmed = {package.name for package in OPTIONAL}
    for name, bounds in required_packages().items():
        if name in slimmed:
            continue
        version = _version(name)
        if version is not None and within(version, bounds):
            good.append(f"{name} {version}")
            continue
        text = "not installed" if version is None else f"{version}, but {bounds} is needed"
        yield _software(name, "fail", text, f"pip install '{name}{bounds}'")
    yield _software("packages", "ok", ", ".join(good))


def required_packages() -> dict[str, str]:
    """Names and version bounds that Strata's own metadata ask for."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    found = (re.match(r"([\w.-]+)\s*([^;]*)(;.*)?$", line) for line in lines)
    return {m[1]: m[2].strip() for m in found if m and "extra" not in (m[3] or "")}


def within(version: str, bounds: str) -> bool:
    """Whether a version satisfies bounds such as ``>=1.72.1,<2``."""
    have = _numbers(version)
    for operator, bound in _BOUND.findall(bounds):
        at_least = have >= _numbers(bound)
        if at_least != (operator == ">="):
            return False
    return True


def _optional(package: OptionalPackage) -> Finding:
    version = _version(package.name)
    if version is not None:
        return _software(package.name, "ok", version)
    source = f"'dtruntime[{package.extra}]'" if package.extra else package.name
    remedy = f"pip install {source}" if package.verdict == "warn" else ""
    return _software(package.name, package.verdict, f"not installed: {package.cost}", remedy)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The release numbers; a pre-release counts as its release."""
    release = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in release[0].split(".")] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


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
        return _environment(name, "ok", f"not set; the default is {DEFAULT_URL}")
    try:
        WorkerConfig(coordinator_url=url)
    except ConfigError as exc:
        return _environment(name, "fail", str(exc), f"export {name}=http://HOST:50051")
    return _environment(name, "ok", url)


def _worker(environment: Mapping[str, str]) -> Finding:
    """RANK, WORLD_SIZE and the others, taken together as a worker takes them."""
    name = "RANK, WORLD_SIZE"
    others = {key: value for key, value in environment.items() if key != "COORDINATOR_URL"}
    try:
        config = WorkerConfig().resolved(others)
    except ValueError as exc:
        remedy = "set them as your launcher does: RANK from 0 to WORLD_SIZE - 1, WORKER_ID unique"
        return _environment(name, "fail", str(exc), remedy)
    if config.rank is None and config.world_size is None:
        text = "not set: workers get the lowest free rank of an elastic job"
        return _environment(name, "ok", text)
    if config.world_size is None:
        text = f"RANK is {config.rank}, but WORLD_SIZE is not set: the job is elastic"
        return _environment(name, "warn", text, "set both, or neither")
    rank = "any" if config.rank is None else config.rank
    return _environment(name, "ok", f"rank {rank} of {config.world_size}")


def _configuration(environment: Mapping[str, str]) -> Finding:
    name = "configuration"
    known = (FILE_VARIABLE, *ENVIRONMENT)
    given = sorted(variable for variable in known if environment.get(variable))
    try:
        Config.load(environment=environment)
    except ConfigError as exc:
        return _environment(name, "fail", str(exc), "correct the variable or the file, or unset it")
    text = f"from {', '.join(given)}" if given else "no variable changes it"
    return _environment(name, "ok", text)


def _unknown(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name in sorted(environment):
        if name.startswith("STRATA_") and name not in VARIABLES:
            near = difflib.get_close_matches(name, sorted(VARIABLES), n=1, cutoff=0.4)
            remedy = f"did you mean {near[0]}? Else unset it" if near else "unset it"
            yield _environment(name, "warn", "is set, but nothing reads it", remedy)


def _proxy(environment: Mapping[str, str], url: str) -> Finding:
    """GRPC sends calls to a proxy where the environment names one, also for private hosts."""
    proxy = next((name for name in _PROXIES if environment.get(name)), None)
    if proxy is None:
        return _environment("proxy", "ok", "none: calls go straight to the coordinator")
    try:
        host, _ = split_address(url)
    except ConfigError:
        host = ""
    excepted = next((environment[name] for name in _EXCEPTIONS if environment.get(name)), "")
    if any(host.endswith(entry.strip()) for entry in excepted.split(",") if entry.strip()):
        return _environment("proxy", "ok", f"{proxy} is set, with an exception for {host}")
    text = f"{proxy} sends calls for {host or 'the coordinator'} to {environment[proxy]}"
    return _environment("proxy", "warn", text, f"export no_grpc_proxy={host or 'HOST'}")


CONNECT_SECONDS = 3.0
ROUND_TRIPS = 9
_REFERRAL = re.compile(r"[;.] 'strata doctor [^']*' checks .*$")
"""Where errors end with a word on this very check."""
CLOCK_SECONDS = 1.0
"""A larger difference between clocks is worth a warning."""


def check_coordinator(url: str) -> Generator[Finding, None, int]:
    """Address, name, connection, calls and clocks, each after the one before it succeeded.

    Returns the number of live workers, 0 when it could not be read.
    """
    try:
        host, _, port = target_of(url).rpartition(":")
    except ConfigError as exc:
        yield _coordinator("address", "fail", str(exc), "give it as --url http://HOST:50051")
        return 0
    host = host.strip("[]")
    for check in (partial(_resolve, host), partial(_connect, host, int(port))):
        yield (finding := check())
        if finding.verdict == "fail":
            return 0
    try:
        with Observer(url) as observer:
            info = observer.server_info()
            trips = [_round_trip(observer) for _ in range(ROUND_TRIPS)]
            live = sum(observer.status(job).live_workers for job in observer.jobs())
    except ConnectionError as exc:
        text = f"the port is open, but calls fail: {_REFERRAL.sub('', str(exc))}"
        remedy = "check that the port is the coordinator's gRPC port, and the proxy setting above"
        yield _coordinator("gRPC", "fail", text, remedy)
        return 0
    median, measured = _statistics([seconds for seconds, _ in trips])
    yield _coordinator("gRPC", "ok", f"round trip {median}", measured=measured)
    # The quickest round trip leaves least room for an error.
    yield _clock(*min(trips))
    text = f"strata {info.version} over {info.transport}, term {info.term}"
    if info.version == __version__:
        yield _coordinator("version", "ok", f"{text}, as here")
    else:
        text += f", but strata {__version__} here"
        remedy = f"install the same version on both: pip install dtruntime=={info.version}"
        yield _coordinator("version", "warn", text, remedy)
    return live


def _statistics(seconds: Sequence[float]) -> tuple[str, dict[str, float]]:
    """Median and maximum, in words and as numbers."""
    median, longest = statistics.median(seconds), max(seconds)
    text = f"{duration(median)} (median of {len(seconds)}), at most {duration(longest)}"
    return text, {"median_seconds": median, "longest_seconds": longest}


def _round_trip(observer: Observer) -> tuple[float, float]:
    """How long a call took, and the coordinator's clock minus ours, if both ways took as long."""
    sent, started = time.time(), time.perf_counter()
    answer = observer.server_info()
    seconds = time.perf_counter() - started
    return seconds, answer.now - (sent + seconds / 2)


def _resolve(host: str) -> Finding:
    started = time.perf_counter()
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as exc:
        return _coordinator(
            "name",
            "fail",
            f"{host} cannot be resolved here: {exc}",
            "check the spelling, /etc/hosts and the DNS settings; an IP address works too",
        )
    seconds = time.perf_counter() - started
    addresses = ", ".join(dict.fromkeys(str(entry[4][0]) for entry in found))
    text = f"{host} is {addresses}" if addresses != host else f"{host} needs no lookup"
    measured = {"seconds": seconds}
    return _coordinator("name", "ok", f"{text} ({duration(seconds)})", measured=measured)


def _connect(host: str, port: int) -> Finding:
    started = time.perf_counter()
    try:
        with socket.create_connection((host, port), timeout=CONNECT_SECONDS):
            seconds = time.perf_counter() - started
    except ConnectionRefusedError:
        return _coordinator(
            "connection",
            "fail",
            f"nothing listens at {host}:{port}",
            f"start one there: strata coordinator 0.0.0.0:{port}; or name another with --url",
        )
    except OSError as exc:
        return _coordinator(
            "connection",
            "fail",
            f"{host}:{port} cannot be reached: {exc}",
            "check the address, the firewall and the security group between the two machines",
        )
    text = f"to {host}:{port} in {duration(seconds)}"
    return _coordinator("connection", "ok", text, measured={"seconds": seconds})


def _clock(seconds: float, difference: float) -> Finding:
    error = seconds / 2
    direction = "ahead of" if difference > 0 else "behind"
    text = f"the coordinator's clock is {duration(abs(difference))} {direction} this one"
    measured = {"difference_seconds": difference, "error_seconds": error}
    if abs(difference) > CLOCK_SECONDS:
        remedy = "run a time service (chrony, systemd-timesyncd) on both, restart the coordinator"
        return _coordinator("clock", "warn", text, remedy, measured)
    text += f", give or take {duration(error)}"
    return _coordinator("clock", "ok", text, measured=measured)


SYNCS = 16
SYNC_BYTES = 4096
SLOW_SYNC_SECONDS = 0.02
LITTLE_SPACE = 1_000_000_000
NO_SPACE = 50_000_000
LITTLE_MEMORY = 500_000_000
SPARE_DESCRIPTORS = 64
"""What a coordinator needs besides one per worker."""
_VOLATILE = {"tmpfs", "ramfs"}
_REMOTE = {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "lustre", "ceph"}
_CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")


def check_machine(data_dir: Path, workers: int) -> Iterator[Finding]:
    """``workers`` is how many a coordinator here has or will have, 0 when unknown."""
    folder = _existing(data_dir.absolute())
    there = folder == data_dir.absolute()
    where = str(data_dir) if there else f"{folder} ({data_dir} is not there yet)"
    yield _space(folder, where)
    yield _sync(folder, where)
    if (kind := _filesystem(folder)) is not None:
        yield kind
    yield _descriptors(workers)
    yield _memory()


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _space(folder: Path, where: str) -> Finding:
    free = shutil.disk_usage(folder).free
    verdict: Verdict = "ok" if free >= LITTLE_SPACE else "warn" if free >= NO_SPACE else "fail"
    remedy = "" if verdict == "ok" else "free some space, or use another --data-dir"
    text = f"{size(free)} free in {where}"
    return _machine("disk space", verdict, text, remedy, {"free_bytes": free})


def _sync(folder: Path, where: str) -> Finding:
    """Write and sync for real: every registration and commit waits for that."""
    try:
        times = list(_sync_times(folder))
    except OSError as exc:
        remedy = "let this user write there, or use another --data-dir"
        return _machine("disk sync", "fail", f"cannot write in {where}: {exc}", remedy)
    text, measured = _statistics(times)
    text = f"fsync takes {text}"
    if measured["median_seconds"] > SLOW_SYNC_SECONDS:
        remedy = "put --data-dir on a local SSD: registrations and commits wait for the disk"
        return _machine("disk sync", "warn", text, remedy, measured)
    return _machine("disk sync", "ok", text, measured=measured)


def _sync_times(folder: Path) -> Iterator[float]:
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(SYNCS):
            started = time.perf_counter()
            file.write(os.urandom(SYNC_BYTES))
            file.flush()
            os.fsync(file.fileno())
            yield time.perf_counter() - started


def _filesystem(folder: Path) -> Finding | None:
    """A warning when the file system is unsuitable for a database."""
    mounts = [p for p in psutil.disk_partitions(all=True) if folder.is_relative_to(p.mountpoint)]
    if not mounts:
        return None
    mount = max(mounts, key=lambda p: len(p.mountpoint))
    where = f"{folder} is on {mount.fstype}"
    if mount.fstype in _VOLATILE:
        remedy = "use a --data-dir on a disk, or the coordinator forgets its jobs at a reboot"
        return _machine("file system", "warn", f"{where}, which is memory", remedy)
    if mount.fstype in _REMOTE:
        remedy = "use a --data-dir on a local disk: SQLite's log needs one"
        return _machine("file system", "warn", f"{where}, over a network", remedy)
    return _machine("file system", "ok", where)


def _descriptors(workers: int) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _machine("open files", "ok", "no limit")
    room = max(0, soft - SPARE_DESCRIPTORS)
    text = f"limit {soft:,}: a coordinator started here serves {count(room, 'worker')}"
    measured = {"soft_limit": soft, "hard_limit": hard}
    if workers > room:
        needed = workers + SPARE_DESCRIPTORS
        text += f", and there are {workers:,}"
        remedy = f"ulimit -n {needed} (systemd: LimitNOFILE={needed}) before starting it"
        return _machine("open files", "warn", text, remedy, measured)
    return _machine("open files", "ok", text, measured=measured)


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    available, total = memory.available, memory.total
    limit = _cgroup_limit()
    if limit is not None and limit < total:
        total = limit
        available = min(available, limit)
    text = f"{size(available)} of {size(total)} available"
    measured = {"available_bytes": float(available), "total_bytes": float(total)}
    if available < LITTLE_MEMORY:
        remedy = "stop something, or use a larger machine: out of memory, processes are killed"
        return _machine("memory", "warn", text, remedy, measured)
    return _machine("memory", "ok", text, measured=measured)


def _cgroup_limit() -> int | None:
    """The memory limit of this container, if there is one."""
    try:
        text = _CGROUP_MEMORY.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
