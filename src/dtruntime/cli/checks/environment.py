"""Python and the packages that Strata uses."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ..._version import __version__
from .finding import Finding, Verdict

GROUP = "software"
DISTRIBUTION = "dtruntime"
OLDEST_PYTHON = (3, 11)
_NVIDIA = Path("/proc/driver/nvidia/version")
_BOUND = re.compile(r"(>=|<)\s*([0-9.]+)")


@dataclass(frozen=True, slots=True)
class Optional:
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
    Optional("pygrpc-native", "fast", "a coordinator here serves far fewer requests per second"),
    Optional("uvloop", "fast", "a coordinator here runs on asyncio's slower event loop"),
    Optional("pyarrow", "", "no data files can be read, and there is no strata demo"),
    Optional("obstore", "", "nothing in s3://, gs:// and az:// can be read or saved"),
    Optional("google-crc32c", "", "no tfrecord files can be read"),
    Optional("torch", "torch", "no torch integration", "note"),
    Optional("jax", "jax", "no JAX integration", "note"),
)
NVML = "nvidia-ml-py"


def check_packages() -> Iterator[Finding]:
    """Versions, required and optional."""
    yield _python()
    yield _strata()
    yield from _required()
    gpu_here = _NVIDIA.exists()
    cost = "no GPU usage in strata status" if gpu_here else "nothing lost, no NVIDIA driver here"
    nvml = Optional(NVML, "gpu", cost, "warn" if gpu_here else "note")
    for package in (*OPTIONAL, nvml):
        yield _optional(package)


def _python() -> Finding:
    version = platform.python_version()
    if sys.version_info >= OLDEST_PYTHON:
        return Finding(GROUP, "Python", "ok", f"{version}, {sys.executable}")
    needed = ".".join(map(str, OLDEST_PYTHON))
    remedy = f"install Python {needed} or newer and a virtual environment with it"
    return Finding(GROUP, "Python", "fail", f"{version} is older than {needed}", remedy)


def _strata() -> Finding:
    installed = _version(DISTRIBUTION)
    if installed is None:
        text = f"{__version__}, used from its sources without being installed"
        return Finding(GROUP, "strata", "note", text)
    if installed != __version__:
        text = f"the code is {__version__}, but {installed} is what is installed"
        return Finding(GROUP, "strata", "warn", text, "pip install --force-reinstall dtruntime")
    return Finding(GROUP, "strata", "ok", __version__)


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
        yield Finding(GROUP, name, "fail", text, f"pip install '{name}{bounds}'")
    yield Finding(GROUP, "packages", "ok", ", ".join(good))


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


def _optional(package: Optional) -> Finding:
    version = _version(package.name)
    if version is not None:
        return Finding(GROUP, package.name, "ok", version)
    remedy = package.remedy if package.verdict == "warn" else ""
    return Finding(GROUP, package.name, package.verdict, f"not installed: {package.cost}", remedy)


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
