"""Code that no test runs is code all the same, and commands in running text exist too."""

import argparse
import ast
import importlib
import re
import shlex

import pytest

from dtruntime.cli.main import build_parser
from scripts.docs_site.repository import CODE
from tests.repository.docs.test_examples import (
    BLOCKS,
    PAGES,
    ROOT,
    Block,
    commands_of,
    make_targets,
)

OURS = {"dtruntime", "strata"}

NOT_RUN = [
    block
    for block in BLOCKS
    if block.language == "python" and block.not_run is not None and "--8<--" not in block.code
]


@pytest.mark.parametrize("block", NOT_RUN, ids=str)
def test_block_that_is_not_run_compiles_and_imports_what_it_names(block: Block) -> None:
    tree = ast.parse(block.code, str(block))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
            module = importlib.import_module(str(node.module))
            missing = [name.name for name in node.names if not hasattr(module, name.name)]
            assert not missing, f"{block}: {node.module} has no {', '.join(missing)}"


INLINE = dict.fromkeys(
    (f"{page.relative_to(ROOT)}", " ".join(found.strip("`").split()))
    for page in PAGES
    for found in (match[0] for match in CODE.finditer(page.read_text(encoding="utf-8")))
    if re.match(r"`(strata|make)\s+[a-z]", found)
)


def complaint_about(command: str) -> str | None:
    program, *words = shlex.split(command)
    if program == "make":
        unknown = {word for word in words if "=" not in word} - make_targets()
        return f"no target {sorted(unknown)}" if unknown else None
    parser = build_parser()
    for word in words:
        (below,) = [
            action.choices
            for action in parser._actions
            if isinstance(action, argparse._SubParsersAction)
        ] or [{}]
        if word.startswith("--"):
            if word.partition("=")[0] not in parser._option_string_actions:
                return f"{parser.prog} has no {word}"
        elif below:
            if word not in below:
                return f"{parser.prog} has no command {word}"
            parser = below[word]
    return None


@pytest.mark.parametrize(("page", "command"), INLINE, ids=lambda text: text)
def test_command_in_running_text_exists(page: str, command: str) -> None:
    complaint = complaint_about(command)
    assert complaint is None, f"{page}: `{command}`: {complaint}"


def test_commands_that_do_not_exist_are_found() -> None:
    assert complaint_about("strata chekpoints ls")
    assert complaint_about("strata status --wach")
    assert complaint_about("make tset")
    assert complaint_about("strata checkpoints verify PLACE") is None


def complaint_about_files(command: list[str]) -> str | None:
    """Which file of the repository is not there, or has no such option; None when all is well."""
    program = ""
    for word in command:
        if re.match(r"(benchmarks|deploy|examples|k8s|scripts)/", word):
            if not (ROOT / word).exists():
                return f"there is no {word}"
            program = word if word.endswith((".py", ".sh")) else program
        elif program and word.startswith("--"):
            option = word.partition("=")[0]
            if option not in (ROOT / program).read_text(encoding="utf-8"):
                return f"{program} has no {option}"
    return None


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "bash"], ids=str)
def test_files_that_commands_name_exist_and_take_their_options(block: Block) -> None:
    for command in commands_of(block.code):
        complaint = complaint_about_files(command)
        assert complaint is None, f"{block}: {shlex.join(command)}: {complaint}"


def test_files_and_options_that_do_not_exist_are_found() -> None:
    assert complaint_about_files(["python", "examples/numpy_trainin.py"])
    assert complaint_about_files(["python", "examples/numpy_training.py", "--foldre", "x"])
    assert complaint_about_files(["scripts/setup-aws.sh", "--bucket", "b", "--dry-run"]) is None
