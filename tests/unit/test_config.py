"""Configuration: file, environment above it, arguments above both."""

from pathlib import Path

import pytest

from dtruntime import CheckpointManager
from dtruntime.config import ENVIRONMENT, Config, CoordinatorConfig, split_address
from dtruntime.errors import ConfigError


def written(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_are_valid_and_need_neither_file_nor_environment() -> None:
    assert Config() == Config.load(environment={}) == Config.from_mapping({})
    assert Config().coordinator.heartbeat_timeout_ms == 30000


def test_file_sets_keys_and_leaves_the_rest(tmp_path: Path) -> None:
    path = written(tmp_path, '[coordinator]\naddress = "0.0.0.0:9"\n[dataset]\nprefetch_shards = 0')
    config = Config.load(path, {})
    assert config.coordinator == CoordinatorConfig(address="0.0.0.0:9")
    assert config.dataset.prefetch_shards == 0
    assert config.dataset.default_shard_size == 10000


def test_environment_beats_the_file_and_arguments_beat_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, '[coordinator]\naddress = "file:1"\ndata_dir = "from-file"')
    monkeypatch.setenv("STRATA_ADDRESS", "environment:2")
    config = Config.from_file(path)
    assert (config.coordinator.address, config.coordinator.data_dir) == (
        "environment:2",
        "from-file",
    )
    chosen = config.override("coordinator", "command line", address="argument:3")
    assert (chosen.coordinator.address, chosen.coordinator.data_dir) == ("argument:3", "from-file")
    assert config.coordinator.address == "environment:2"


def test_file_may_be_named_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = written(tmp_path, "[checkpoint]\nkeep_last_n = 2\ninterval_steps = 7")
    monkeypatch.setenv("STRATA_CONFIG", str(named))
    assert Config.load().checkpoint.keep_last_n == 2
    with CheckpointManager(tmp_path / "checkpoints") as manager:
        for step in range(5):
            manager.save(b"x", step)
        manager.wait()
        assert manager.steps() == [3, 4]
        assert manager.should_save(7)
    other = tmp_path / "other.toml"
    other.write_text("[checkpoint]\nkeep_last_n = 3", encoding="utf-8")
    assert Config.load(other).checkpoint.keep_last_n == 3
    monkeypatch.setenv("STRATA_CONFIG", str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match=r"none\.toml does not exist"):
        Config.load()


@pytest.mark.parametrize("variable", ENVIRONMENT)
def test_every_variable_sets_its_key(variable: str) -> None:
    texts = {"backend": "s3", "address": "h:1", "http_address": "h:2", "trace_ratio": "0.5"}
    texts["drain_seconds"] = "7.5"
    section, key = ENVIRONMENT[variable]
    text = texts.get(key, "29000" if key.endswith("timeout_ms") else "77")
    config = Config.load(environment={variable: text})
    assert str(getattr(getattr(config, section), key)) == text


def test_empty_variable_counts_as_absent() -> None:
    assert Config.load(environment={"STRATA_ADDRESS": ""}) == Config()


def test_variables_that_bound_each_other_are_judged_together() -> None:
    config = Config.load(
        environment={
            "STRATA_HEARTBEAT_INTERVAL_MS": "20000",
            "STRATA_HEARTBEAT_TIMEOUT_MS": "60000",
        }
    )
    assert config.coordinator.heartbeat_interval_ms == 20000


def test_file_and_variable_that_bound_each_other_are_judged_together(tmp_path: Path) -> None:
    path = written(tmp_path, "[coordinator]\nheartbeat_interval_ms = 20000")
    config = Config.load(path, {"STRATA_HEARTBEAT_TIMEOUT_MS": "60000"})
    assert config.coordinator.heartbeat_timeout_ms == 60000
    with pytest.raises(ConfigError, match="at least twice"):
        Config.load(path, {})


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ({"coordinator": {"heartbeat_intervall_ms": 1}}, "did you mean heartbeat_interval_ms"),
        ({"coordinator": {"adress": "x"}}, "did you mean address"),
        ({"storage": {"buckets": "x"}}, "did you mean bucket"),
        ({"checkpoints": {}}, r"did you mean \[checkpoint\]"),
        ({"dataset": {"zzz": 1}}, "valid: cache_dir, cache_limit_bytes, default_shard_size"),
        ({"zzz": {}}, "valid: checkpoint, coordinator, dataset, storage"),
    ],
)
def test_unknown_key_names_the_nearest_valid_one(document: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Config.from_mapping(document, "config.toml")


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ({"coordinator": 7}, "must be a table"),
        ({"coordinator": {"address": 7}}, "must be str"),
        ({"coordinator": {"address": "nowhere"}}, "HOST:PORT"),
        ({"coordinator": {"heartbeat_interval_ms": "soon"}}, "must be a number"),
        ({"coordinator": {"heartbeat_interval_ms": 1.5}}, "must be int"),
        ({"coordinator": {"heartbeat_interval_ms": True}}, "must be int"),
        ({"coordinator": {"heartbeat_interval_ms": 0}}, "must be positive"),
        ({"coordinator": {"heartbeat_timeout_ms": 1999}}, "at least twice"),
        ({"coordinator": {"worker_rate_limit": 0}}, "must be positive"),
        ({"coordinator": {"worker_rate_limit": float("nan")}}, "must be positive"),
        ({"coordinator": {"transport": "carrier pigeon"}}, "one of auto, pygrpc-native, grpc.aio"),
        ({"storage": {"backend": "tape"}}, "one of local, s3, gcs, azure"),
        ({"checkpoint": {"keep_last_n": 0}}, "must be positive"),
        ({"checkpoint": {"compression": "rar"}}, "one of none, gzip, zstd"),
        ({"dataset": {"prefetch_shards": -1}}, "prefetch_shards must not be negative"),
        ({"dataset": {"cache_limit_bytes": -1}}, "cache_limit_bytes must not be negative"),
    ],
)
def test_bad_value_is_refused_by_name(document: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        Config.from_mapping(document, "config.toml")
    assert isinstance(caught.value, ValueError)


def test_whole_number_is_good_for_a_rate() -> None:
    config = Config.from_mapping({"coordinator": {"worker_rate_limit": 5}})
    assert config.coordinator.worker_rate_limit == 5.0


def test_bad_variable_is_named() -> None:
    with pytest.raises(ConfigError, match=r"STRATA_HEARTBEAT_INTERVAL_MS.*must be a number"):
        Config.load(environment={"STRATA_HEARTBEAT_INTERVAL_MS": "soon"})


def test_file_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml does not exist"):
        Config.from_file(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"config\.toml cannot be read"):
        Config.from_file(written(tmp_path, "[coordinator"))
    with pytest.raises(ConfigError, match="cannot be read"):
        Config.from_file(tmp_path)


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("host:1", ("host", 1)),
        ("0.0.0.0:50051", ("0.0.0.0", 50051)),
        ("http://host:1", ("host", 1)),
        ("http://host:1/", ("host", 1)),
        ("grpc://host:1", ("host", 1)),
        ("[::1]:65535", ("[::1]", 65535)),
        ("host:0", ("host", 0)),
    ],
)
def test_addresses_are_split(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize(
    "address", ["", "host", ":1", "host:", "host:x", "host:-1", "host:65536", "host:²", "host:1/x"]
)
def test_addresses_without_host_or_port_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        split_address(address)


def test_key_of_a_feature_that_is_gone_is_ignored() -> None:
    assert Config.from_mapping({"coordinator": {"preview": "off"}}) == Config()
