"""The examples run as their documentation says."""

import json
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_resumable_loader_ends_with_the_same_model_when_it_is_stopped(tmp_path: Path) -> None:
    sys.path.insert(0, str(EXAMPLES))
    try:
        from resumable_loader import make_data  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    data = tmp_path / "data"
    data.mkdir()
    make_data(data)
    whole, parts = tmp_path / "whole.json", tmp_path / "parts.json"
    run("resumable_loader.py", "--data", data, "--state", whole)
    run("resumable_loader.py", "--data", data, "--state", parts, "--stop-after", 70)
    output = run("resumable_loader.py", "--data", data, "--state", parts)
    assert "epoch 0: 130 steps" in output
    assert json.loads(whole.read_text()) == json.loads(parts.read_text())
