"""The session of a worker in another library's training loop."""

import pytest

from dtruntime.errors import ConfigError
from dtruntime.integrations.worker_session import WorkerSession


def test_environment_is_read_when_training_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    session = WorkerSession(handle_signals=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="COORDINATOR_URL"):
        session.begin(0)


def test_wrong_arguments_are_refused_when_they_are_given() -> None:
    with pytest.raises(ConfigError, match="TLS"):
        WorkerSession("https://somewhere:50051")
    with pytest.raises(ValueError, match="job"):
        WorkerSession(job="no\njob")
