"""Which job a run without a name belongs to."""

import pytest

from dtruntime.run.components import job_of_program
from dtruntime.types import check_id


@pytest.mark.parametrize(
    ("program", "job"),
    [
        ("train_ddp.py", "train_ddp"),
        ("/home/ann/code/train_ddp.py", "train_ddp"),
        ("./my training (2).py", "my-training-2"),
        ("/usr/lib/pkg/mod.py", "mod"),
        ("/usr/lib/pkg/__main__.py", "pkg"),
        ("/usr/bin/trainer", "trainer"),
        ("été.py", "t"),
        ("-c", None),
        ("", None),
        ("…", None),
        ("/x/ipykernel_launcher.py", None),
        ("a" * 300, "a" * 200),
    ],
)
def test_job_is_called_as_its_program(program: str, job: str | None) -> None:
    assert job_of_program([program]) == job
    if job is not None:
        check_id("job", job)


def test_environment_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_JOB", "chosen")
    assert job_of_program(["train.py"]) == "chosen"
    monkeypatch.delenv("STRATA_JOB")
    assert job_of_program([]) is None
