"""The ten lines of README as a process: ``python readme_worker.py [OLD=>NEW ...]``.

Runs the first Python block of README in the current folder, with each OLD in it replaced by NEW,
and keeps the weights that this process has at the end. If there is a file ``hold``, it waits after
the step of the optimizer that the file names, until that is gone.
"""

import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from dtruntime.telemetry import configure_logging

ROOT = Path(__file__).parents[3]
HOLD = Path("hold")
steps = 0


def ten_lines() -> str:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]


def hold(*_: object) -> None:
    """Called by torch after each step of an optimizer."""
    global steps
    steps += 1
    while HOLD.exists() and steps >= int(HOLD.read_text() or steps + 1):
        Path(f"held-{os.getpid()}").touch()
        time.sleep(0.02)


def main() -> None:
    configure_logging()
    torch.manual_seed(5)
    torch.set_num_threads(1)
    register_optimizer_step_post_hook(hold)
    code = ten_lines()
    for argument in sys.argv[1:]:
        old, new = argument.split("=>")
        assert old in code
        code = code.replace(old, new)
    found: dict = {}
    exec(compile(code, "README.md", "exec"), found)
    state = found["model"].state_dict()
    place = f"{found['run'].rank}-{os.getpid()}"
    np.savez(f"weights-{place}.npz", **{name: value.numpy() for name, value in state.items()})


if __name__ == "__main__":
    main()
