#!/usr/bin/env python3
"""Generate the Python message classes from proto/coordinator.proto.

`generate-proto.py` writes src/dtruntime/rpc/gen/; `generate-proto.py --check` only compares and
exits with status 1 when what is there is not what the proto file gives.
"""

import argparse
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto" / "coordinator.proto"
TARGET = ROOT / "src" / "dtruntime" / "rpc" / "gen"
INIT = '"""Message classes generated from `proto/` by `make proto`; not to be edited."""\n'


def generate(folder: Path) -> dict[str, str]:
    """Run protoc into `folder` and return the content of each file by name."""
    folder.joinpath("__init__.py").write_text(INIT)
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={PROTO.parent}",
            f"--proto_path={files('grpc_tools') / '_proto'}",
            f"--python_out={folder}",
            f"--pyi_out={folder}",
            PROTO.name,
        ]
    )
    if status != 0:
        sys.exit(f"protoc failed on {PROTO.relative_to(ROOT)}")
    return contents(folder)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.glob("*.py*")) if path.is_file()}


def check() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        fresh = generate(Path(scratch))
    present = contents(TARGET)
    stale = sorted(name for name in fresh | present if fresh.get(name) != present.get(name))
    if stale:
        names = ", ".join(stale)
        sys.exit(f"{TARGET.relative_to(ROOT)} is stale ({names}): run make proto")


def write() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        fresh = generate(Path(scratch))
    TARGET.mkdir(parents=True, exist_ok=True)
    for name in contents(TARGET).keys() - fresh.keys():
        TARGET.joinpath(name).unlink()
    for name, text in fresh.items():
        TARGET.joinpath(name).write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    arguments = parser.parse_args()
    if not PROTO.is_file():
        sys.exit(f"{PROTO.relative_to(ROOT)} is missing: there is nothing to generate from")
    if arguments.check:
        check()
    else:
        write()


if __name__ == "__main__":
    main()
