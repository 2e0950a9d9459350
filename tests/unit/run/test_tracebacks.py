"""What a program shows of its run's errors: the message, and its own frames."""

import traceback
from pathlib import Path

import pytest

import dtruntime
from dtruntime import Run, StrataError

PACKAGE = str(Path(dtruntime.__file__).parent)


class Unwilling:
    def state_dict(self) -> dict[str, int]:
        return {"x": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise StrataError("this one is not for me: use another folder")


def frames_of(tmp_path: Path) -> tuple[list[str], list[str]]:
    """The frames of an error from restoring: those of the package, and all others."""
    with Run(tmp_path / "ck", max_steps=2, track={"x": Unwilling()}) as run:
        list(run)
    with pytest.raises(StrataError) as caught:
        Run(tmp_path / "ck", max_steps=4, track={"x": Unwilling()}).__enter__()
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    own = [file for file in files if file.startswith(PACKAGE)]
    return own, [file for file in files if file not in own]


def test_error_of_a_run_has_the_frames_of_the_program_alone(tmp_path):
    own, others = frames_of(tmp_path)
    assert len(own) == 1, "that of the call"
    assert others == [__file__, __file__], "the call, and the program's method that raised"


def test_all_frames_are_shown_when_debugging(tmp_path, monkeypatch):
    monkeypatch.setenv("STRATA_LOG", "debug")
    own, _ = frames_of(tmp_path)
    assert len(own) > 4
