"""Where a worker's rank and world size come from."""

import pytest

from dtruntime.client.worker_config import WorkerConfig
from dtruntime.errors import ConfigError

OMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
PMI = {"PMI_RANK": "2", "PMI_SIZE": "3"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}
KUBERNETES = {"JOB_COMPLETION_INDEX": "4", "JOB_COMPLETIONS": "5"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "6"}


def place(env: dict[str, str], **given: int) -> tuple[int | None, int | None]:
    """Rank and world size in an environment."""
    config = WorkerConfig(**given).resolved(env)  # type: ignore[arg-type]
    return config.rank, config.world_size


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (TORCHRUN, (5, 6)),
        (OMPI, (1, 2)),
        (PMI, (2, 3)),
        (SLURM, (3, 4)),
        (KUBERNETES, (4, 5)),
        ({"JOB_COMPLETION_INDEX": "0", "STRATA_WORLD_SIZE": "7"}, (0, 7)),
        ({}, (None, None)),
    ],
)
def test_launcher_says_rank_and_world_size(
    env: dict[str, str], expected: tuple[int | None, int | None]
) -> None:
    assert place(env) == expected


def test_launchers_inside_of_others_come_first() -> None:
    everything: dict[str, str] = {}
    for env, expected in [
        (KUBERNETES, (4, 5)),
        (SLURM, (3, 4)),
        (PMI, (2, 3)),
        (OMPI, (1, 2)),
        (TORCHRUN, (5, 6)),
    ]:
        everything |= env
        assert place(everything) == expected
    assert place(everything, rank=0, world_size=9) == (0, 9)


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
        {"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"},
        {"JOB_COMPLETION_INDEX": "0"},
        {"STRATA_WORLD_SIZE": "4"},
        {"OMPI_COMM_WORLD_RANK": "0"},
        {"PMI_SIZE": "4", "PMI_RANK": ""},
    ],
)
def test_half_of_a_launcher_is_none(env: dict[str, str]) -> None:
    assert place(env) == (None, None)


def test_rank_or_world_size_may_be_given_alone() -> None:
    assert place({"RANK": "3"}) == (3, None)
    assert place({"WORLD_SIZE": "3"}) == (None, 3)


def test_launcher_completes_what_it_agrees_with_and_nothing_else() -> None:
    assert place({**SLURM, "WORLD_SIZE": "4"}) == (3, 4)
    assert place({**SLURM, "RANK": "3"}) == (3, 4)
    assert place(SLURM, world_size=4) == (3, 4)
    assert place({**SLURM, "WORLD_SIZE": "8"}) == (None, 8)
    assert place(SLURM, world_size=2) == (None, 2)
    assert place(SLURM, rank=1) == (1, None)
    assert place({**OMPI, **SLURM, "WORLD_SIZE": "4"}) == (3, 4)


def test_elastic_torchrun_gives_rank_and_size_for_each_restart() -> None:
    env = {**SLURM, "RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "3"}
    config = WorkerConfig().resolved(env)
    assert (config.rank, config.world_size, config.attempt) == (1, 2, 3)


def test_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(ConfigError, match="SLURM_NTASKS"):
        place({**SLURM, "SLURM_NTASKS": "4(x2)"})


def test_rank_beyond_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="ranks are 0 to 1"):
        place({"PMI_RANK": "2", "PMI_SIZE": "2"})
