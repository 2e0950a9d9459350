"""The command ``strata`` in this process: its exit code, and what it prints."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest

from dtruntime.cli.main import main


@dataclass(frozen=True)
class Result:
    returncode: int
    stdout: str
    stderr: str


def strata(*arguments: object, **env: str) -> Result:
    """Run the command, with more in the environment."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        for name, value in {"COLUMNS": "250", **env}.items():
            patch.setenv(name, value)
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:  # arguments that cannot be parsed
            code = int(end.code or 0)
    return Result(code, out.getvalue(), err.getvalue())
