"""Configuration: a TOML file, overridden by the environment, overridden by arguments.

Sections and keys are the fields of the dataclasses below. The error for an unknown key names the
nearest valid one.
"""

from __future__ import annotations

import difflib
import os
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from .errors import ConfigError

T = TypeVar("T")

DEFAULT_URL = "http://localhost:50051"


def _positive(section: str, settings: object, *names: str) -> None:
    for name in names:
        if not getattr(settings, name) > 0:
            raise ConfigError(f"[{section}] {name} must be positive, not {getattr(settings, name)}")


def _not_negative(section: str, settings: object, *names: str) -> None:
    for name in names:
        if not getattr(settings, name) >= 0:
            raise ConfigError(f"[{section}] {name} must not be negative: {getattr(settings, name)}")


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """The coordinator and its failure detection."""

    address: str = "0.0.0.0:50051"
    """HOST:PORT of the gRPC service; port 0 takes a free one."""
    http_address: str = "0.0.0.0:3000"
    """HOST:PORT of the HTTP API and the dashboard; port 0 takes a free one, empty turns it off."""
    http_origins: str = ""
    """Further origins whose pages may request actions, as ``https://HOST``, separated by commas."""
    data_dir: str = "strata-data"
    """Where the coordinator keeps its state."""
    heartbeat_interval_ms: int = 1000
    """How often workers report, unless they choose otherwise."""
    heartbeat_timeout_ms: int = 30000
    """A worker silent for this long is declared dead."""
    drain_seconds: float = 0.0
    """How long it keeps serving after SIGTERM while workers are there, so that they can save."""
    worker_rate_limit: float = 1000.0
    """Calls per second one worker may make on average; four times that in a burst."""
    peer_rate_limit: float = 4000.0
    """Calls per second one address may make on average; twice that in a burst. A core serves about
    four times as many."""
    max_request_bytes: int = 4 * 1024 * 1024
    """A larger request is refused."""
    max_dataset_bytes: int = 64 * 1024 * 1024
    """The same for registering a dataset, which carries the layout and index of its files."""
    max_workers_per_job: int = 65536
    """A job takes no more workers than this, and no higher rank or world size."""
    transport: Literal["auto", "pygrpc-native", "grpc.aio"] = "auto"
    """The gRPC server; ``auto`` takes pygrpc-native when it is installed."""

    def __post_init__(self) -> None:
        _positive("coordinator", self, "heartbeat_interval_ms", "heartbeat_timeout_ms")
        _positive("coordinator", self, "worker_rate_limit", "peer_rate_limit")
        _positive("coordinator", self, "max_request_bytes", "max_dataset_bytes")
        _positive("coordinator", self, "max_workers_per_job")
        _not_negative("coordinator", self, "drain_seconds")
        if self.heartbeat_timeout_ms < 2 * self.heartbeat_interval_ms:
            raise ConfigError(
                f"[coordinator] heartbeat_timeout_ms ({self.heartbeat_timeout_ms}) must be at "
                f"least twice heartbeat_interval_ms ({self.heartbeat_interval_ms}), or one late "
                "heartbeat kills a healthy worker"
            )
        split_address(self.address)
        if self.http_address:
            split_address(self.http_address)


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """Where checkpoints go."""

    backend: Literal["local", "s3", "gcs", "azure"] = "local"
    """Where plain checkpoint paths are; a URL such as ``s3://`` needs no setting."""
    bucket: str = ""
    """The bucket or container in which a plain path is a prefix; not for ``local``."""
    region: str = ""
    """The region of S3 buckets; by default that of this machine's AWS settings."""


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """When checkpoints are made and how long they are kept."""

    interval_steps: int = 1000
    """``should_save`` is true every this many steps."""
    keep_last_n: int = 5
    """How many of the newest checkpoints are kept."""
    compression: Literal["none", "gzip", "zstd"] = "none"
    """How chunks are compressed; those that do not shrink are stored uncompressed."""
    exit_seconds: int = 600
    """At exit, saves that have written nothing for this long are given up."""

    def __post_init__(self) -> None:
        _positive("checkpoint", self, "interval_steps", "keep_last_n", "exit_seconds")


@dataclass(frozen=True, slots=True)
class DatasetConfig:
    """Defaults for datasets."""

    default_shard_size: int = 10000
    """How many samples a shard has, unless the registration says otherwise."""
    prefetch_shards: int = 2
    """A loader reads at least this many shards ahead; more if many are mixed or all are small."""
    cache_dir: str = ""
    """The folder for cached remote data; empty: ``$STRATA_CACHE_DIR/shards``."""
    cache_limit_bytes: int = 0
    """How much disk space that cache may take; 0 turns it off."""

    def __post_init__(self) -> None:
        _positive("dataset", self, "default_shard_size")
        _not_negative("dataset", self, "prefetch_shards", "cache_limit_bytes")


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """What is sent to an OpenTelemetry collector."""

    otlp_endpoint: str = ""
    """``http://HOST:4318`` of a collector that takes OTLP over HTTP; empty: nothing is sent."""
    trace_ratio: float = 0.1
    """The share of saves and barriers that is traced, 0 to 1."""
    metrics_interval_ms: int = 15000
    """How often the coordinator sends its metrics; 0: never."""

    def __post_init__(self) -> None:
        if not 0 <= self.trace_ratio <= 1:
            raise ConfigError(
                f"[telemetry] trace_ratio must be from 0 to 1, not {self.trace_ratio}"
            )
        _not_negative("telemetry", self, "metrics_interval_ms")


ENVIRONMENT: Mapping[str, tuple[str, str]] = types.MappingProxyType(
    {
        "STORAGE_BACKEND": ("storage", "backend"),
        "CHECKPOINT_BUCKET": ("storage", "bucket"),
        "AWS_REGION": ("storage", "region"),
        "STRATA_EXIT_SECONDS": ("checkpoint", "exit_seconds"),
        "STRATA_ADDRESS": ("coordinator", "address"),
        "STRATA_HTTP_ADDRESS": ("coordinator", "http_address"),
        "STRATA_DATA_DIR": ("coordinator", "data_dir"),
        "STRATA_HEARTBEAT_INTERVAL_MS": ("coordinator", "heartbeat_interval_ms"),
        "STRATA_HEARTBEAT_TIMEOUT_MS": ("coordinator", "heartbeat_timeout_ms"),
        "STRATA_DRAIN_SECONDS": ("coordinator", "drain_seconds"),
        "STRATA_CACHE_LIMIT_BYTES": ("dataset", "cache_limit_bytes"),
        "OTEL_EXPORTER_OTLP_ENDPOINT": ("telemetry", "otlp_endpoint"),
        "STRATA_TRACE_RATIO": ("telemetry", "trace_ratio"),
        "STRATA_METRICS_INTERVAL_MS": ("telemetry", "metrics_interval_ms"),
    }
)
"""Environment variables and the keys they set."""
IGNORED = frozenset({("coordinator", "preview")})
"""Obsolete keys that are accepted and ignored."""
FILE_VARIABLE = "STRATA_CONFIG"
"""Names the configuration file when no path is given."""


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that can be configured, with defaults.

    ``Config()`` reads neither file nor environment; `Config.load` reads both.
    """

    coordinator: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Config:
        """Read a TOML file, overridden by the environment."""
        return cls.load(path)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Config:
        """Read ``path``, or the file that ``STRATA_CONFIG`` names, overridden by the environment.

        The environment is ``os.environ`` by default.
        """
        environment = os.environ if environment is None else environment
        if path is None:
            path = environment.get(FILE_VARIABLE) or None
        values = {} if path is None else _read_document(_read_toml(Path(path)), os.fspath(path))
        for variable, (section, key) in ENVIRONMENT.items():
            value = environment.get(variable)
            if value:
                setting = _read_section(section, {key: value}, f"environment variable {variable}")
                values.setdefault(section, {}).update(setting)
        return cls()._with(values)

    @classmethod
    def from_mapping(cls, document: Mapping[str, Any], source: str = "configuration") -> Config:
        """Build from nested mappings; unknown keys are refused."""
        return cls()._with(_read_document(document, source))

    def override(self, section: str, source: str, /, **values: Any) -> Config:
        """A copy with keys of one section replaced; strings are converted to the key's type."""
        return self._with({section: _read_section(section, values, source)})

    def _with(self, values: Mapping[str, Mapping[str, Any]]) -> Config:
        """Sections are validated when all their keys are set: some depend on each other."""
        sections = {name: replace(getattr(self, name), **keys) for name, keys in values.items()}
        return replace(self, **sections)


def split_address(address: str) -> tuple[str, int]:
    """Split ``HOST:PORT``, also ``[v6]:PORT`` and ``http://HOST:PORT``."""
    bare = address.removeprefix("http://").removeprefix("grpc://").rstrip("/")
    host, separator, port = bare.rpartition(":")
    number = int(port) if port.isascii() and port.isdigit() else -1
    if not separator or not host or not 0 <= number <= 65535:
        raise ConfigError(f"address {address!r} is not of the form HOST:PORT, PORT from 0 to 65535")
    return host, number


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise ConfigError(f"configuration file {path} does not exist") from exc
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"configuration file {path} cannot be read: {exc}") from exc


def _read_document(document: Mapping[str, Any], source: str) -> dict[str, dict[str, Any]]:
    for section, values in document.items():
        _check_known(section, (f.name for f in fields(Config)), f"{source}: section", "[{}]")
        if not isinstance(values, Mapping):
            raise ConfigError(f"{source}: [{section}] must be a table, not {values!r}")
    return {name: _read_section(name, values, source) for name, values in document.items()}


def _read_section(section: str, values: Mapping[str, Any], source: str) -> dict[str, Any]:
    kinds = typing.get_type_hints(typing.get_type_hints(Config)[section])
    read = {}
    for key, value in values.items():
        if (section, key) in IGNORED:
            continue
        _check_known(key, kinds, f"{source}: key of [{section}]", "{}")
        read[key] = _as_type(kinds[key], value, f"{source}: [{section}] {key}")
    return read


def _check_known(name: str, valid: Iterable[str], what: str, form: str) -> None:
    names = sorted(valid)
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {form.format(near[0])}?" if near else f"valid: {', '.join(names)}"
    raise ConfigError(f"{what} {form.format(name)} is unknown; {hint}")


def _as_type(kind: Any, value: Any, where: str) -> Any:
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise ConfigError(f"{where} must be one of {', '.join(choices)}, not {value!r}")
        return value
    if kind in (int, float) and isinstance(value, str):
        try:
            return kind(value)
        except ValueError:
            raise ConfigError(f"{where} must be a number, not {value!r}") from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{where} must be {kind.__name__}, not {value!r}")
    return value
