"""Python and the packages that Strata uses."""

from __future__ import annotations

import difflib
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ..._version import __version__
from ...client import WorkerConfig
from ...config import DEFAULT_URL, ENVIRONMENT, FILE_VARIABLE, Config, split_address
from ...errors import ConfigError
from .finding import Finding, Verdict

SOFTWARE = "software"
DISTRIBUTION = "dtruntime"
OLDEST_PYTHON = (3, 11)
_NVIDIA = Path("/proc/driver/nvidia/version")
_BOUND = re.compile(r"(>=|<)\s*([0-9.]+)")


@dataclass(frozen=True, slots=True)
class OptionalPackage:
    """A package that Strata does without, and at what price."""

    name: str
    extra: str
    """The extra that brings it; empty: it is installed with Strata, unless that was slimmed."""
    cost: str
    verdict: Verdict = "warn"

    @property
    def remedy(self) -> str:
        """What to type."""
        wanted = f"'dtruntime[{self.extra}]'" if self.extra else self.name
        return f"pip install {wanted}"


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
        return Finding(SOFTWARE, "Python", "ok", f"{version}, {sys.executable}")
    needed = ".".join(map(str, OLDEST_PYTHON))
    remedy = f"install Python {needed} or newer and a virtual environment with it"
    return Finding(SOFTWARE, "Python", "fail", f"{version} is older than {needed}", remedy)


def _strata() -> Finding:
    installed = _version(DISTRIBUTION)
    if installed is None:
        text = f"{__version__}, used from its sources without being installed"
        return Finding(SOFTWARE, "strata", "note", text)
    if installed != __version__:
        text = f"the code is {__version__}, but {installed} is what is installed"
        return Finding(SOFTWARE, "strata", "warn", text, "pip install --force-reinstall dtruntime")
    return Finding(SOFTWARE, "strata", "ok", __version__)


def _required() -> Iterator[Finding]:
    """One line for all that is as it should be, one for each that is not."""
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
        yield Finding(SOFTWARE, name, "fail", text, f"pip install '{name}{bounds}'")
    yield Finding(SOFTWARE, "packages", "ok", ", ".join(good))


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
        return Finding(SOFTWARE, package.name, "ok", version)
    remedy = package.remedy if package.verdict == "warn" else ""
    return Finding(
        SOFTWARE, package.name, package.verdict, f"not installed: {package.cost}", remedy
    )


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


ENVIRONMENT_GROUP = "environment"
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
        return Finding(ENVIRONMENT_GROUP, name, "ok", f"not set; the default is {DEFAULT_URL}")
    try:
        WorkerConfig(coordinator_url=url)
    except ConfigError as exc:
        return Finding(
            ENVIRONMENT_GROUP, name, "fail", str(exc), f"export {name}=http://HOST:50051"
        )
    return Finding(ENVIRONMENT_GROUP, name, "ok", url)


def _worker(environment: Mapping[str, str]) -> Finding:
    """RANK, WORLD_SIZE and the others, taken together as a worker takes them."""
    name = "RANK, WORLD_SIZE"
    others = {key: value for key, value in environment.items() if key != "COORDINATOR_URL"}
    try:
        config = WorkerConfig().resolved(others)
    except ValueError as exc:
        remedy = "set them as your launcher does: RANK from 0 to WORLD_SIZE - 1, WORKER_ID unique"
        return Finding(ENVIRONMENT_GROUP, name, "fail", str(exc), remedy)
    if config.rank is None and config.world_size is None:
        text = "not set: workers get the lowest free rank of an elastic job"
        return Finding(ENVIRONMENT_GROUP, name, "ok", text)
    if config.world_size is None:
        text = f"RANK is {config.rank}, but WORLD_SIZE is not set: the job is elastic"
        return Finding(ENVIRONMENT_GROUP, name, "warn", text, "set both, or neither")
    rank = "any" if config.rank is None else config.rank
    return Finding(ENVIRONMENT_GROUP, name, "ok", f"rank {rank} of {config.world_size}")


def _configuration(environment: Mapping[str, str]) -> Finding:
    name = "configuration"
    known = (FILE_VARIABLE, *ENVIRONMENT)
    given = sorted(variable for variable in known if environment.get(variable))
    try:
        Config.load(environment=environment)
    except ConfigError as exc:
        return Finding(
            ENVIRONMENT_GROUP,
            name,
            "fail",
            str(exc),
            "correct the variable or the file, or unset it",
        )
    text = f"from {', '.join(given)}" if given else "no variable changes it"
    return Finding(ENVIRONMENT_GROUP, name, "ok", text)


def _unknown(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name in sorted(environment):
        if name.startswith("STRATA_") and name not in VARIABLES:
            near = difflib.get_close_matches(name, sorted(VARIABLES), n=1, cutoff=0.4)
            remedy = f"did you mean {near[0]}? Else unset it" if near else "unset it"
            yield Finding(ENVIRONMENT_GROUP, name, "warn", "is set, but nothing reads it", remedy)


def _proxy(environment: Mapping[str, str], url: str) -> Finding:
    """GRPC sends calls to a proxy where the environment names one, also for private hosts."""
    proxy = next((name for name in _PROXIES if environment.get(name)), None)
    if proxy is None:
        return Finding(
            ENVIRONMENT_GROUP, "proxy", "ok", "none: calls go straight to the coordinator"
        )
    try:
        host, _ = split_address(url)
    except ConfigError:
        host = ""
    excepted = next((environment[name] for name in _EXCEPTIONS if environment.get(name)), "")
    if any(host.endswith(entry.strip()) for entry in excepted.split(",") if entry.strip()):
        return Finding(
            ENVIRONMENT_GROUP, "proxy", "ok", f"{proxy} is set, with an exception for {host}"
        )
    text = f"{proxy} sends calls for {host or 'the coordinator'} to {environment[proxy]}"
    return Finding(
        ENVIRONMENT_GROUP, "proxy", "warn", text, f"export no_grpc_proxy={host or 'HOST'}"
    )
