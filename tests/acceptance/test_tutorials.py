"""The documentation followed in order, as somebody does who tries one thing after another.

All programs use one coordinator and nothing says which job they are of.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from dtruntime.client import Observer
from dtruntime.testing import LocalCoordinator

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
PROGRAMS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "quickstart": ((), ()),
    "real_training_simple": ((), ()),
    "ddp_torchrun": (TORCHRUN, ("--epochs", "1", "--samples", "2048")),
    "fsdp_torchrun": (TORCHRUN, ("--epochs", "1", "--samples", "1024")),
    "jax_training": ((), ("--epochs", "1", "--samples", "2048")),
}
"""By the name of the program: what runs it, and what makes it short."""


def program_of(name: str, folder: Path) -> Path:
    if name != "quickstart":
        return EXAMPLES / f"{name}.py"
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert found is not None
    program = folder / "quickstart.py"
    program.write_text(found[1], encoding="utf-8")
    return program


def follow(name: str, folder: Path, url: str) -> None:
    launcher, options = PROGRAMS[name]
    program = program_of(name, folder)
    env = {
        **os.environ,
        "COORDINATOR_URL": url,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "JAX_PLATFORMS": "cpu",
        "STRATA_CACHE_DIR": str(folder / "cache"),
    }
    where = [] if name == "quickstart" else ["--folder", str(folder / name)]
    command = [sys.executable, *launcher, str(program), *where, *options]
    ended = subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, f"{name}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("order", ["as they come", "the other way round"])
def test_tutorials_one_after_another_at_one_coordinator(order: str, tmp_path: Path) -> None:
    names = list(PROGRAMS) if order == "as they come" else list(reversed(PROGRAMS))
    with LocalCoordinator(tmp_path / "coordinator") as coordinator:
        for name in names:
            follow(name, tmp_path, coordinator.url)
        with Observer(coordinator.url) as observer:
            assert observer.jobs() == sorted(PROGRAMS)
            for name in names:
                status = observer.status(name)
                assert status.latest_checkpoint is not None, name
                assert status.latest_checkpoint.step > 0, name
                assert not status.incomplete_epochs, name
