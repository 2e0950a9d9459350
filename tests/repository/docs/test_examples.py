"""Every example of the README and of docs/ works as printed.

A python block runs by itself in a fresh process, with `COORDINATOR_URL` naming a live coordinator
and `data/train` in the working folder holding parquet files with the columns `pixels` and `label`.
A comment on the line before a block changes that:

- `<!-- continues -->`: the block runs after the one before it, in the same process;
- `<!-- not run: REASON -->`: the block is skipped, and the reason appears in the test report.

A bash block is not run: its commands must exist.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import Result, strata

ROOT = Path(__file__).parents[3]
PAGES = [
    page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if page.exists()
]

OTHER_COMMANDS = {"cd", "export", "git", "pip", "python"}
"""First words of commands that are not ours to check."""


@dataclass(frozen=True)
class Block:
    """One fenced block of a page; `line` is that of its first line of code."""

    page: str
    line: int
    language: str
    code: str
    comment: str
    """The HTML comment on the line before the fence, without its delimiters; may be empty."""

    @property
    def continues(self) -> bool:
        return self.comment == "continues"

    @property
    def not_run(self) -> str | None:
        """The reason why the block is skipped, None when it is not."""
        found = re.fullmatch(r"not run:?(.*)", self.comment, re.DOTALL)
        return found[1].strip() if found else None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


FENCE = re.compile(
    r"(?:^[ ]*<!--[ ]*(?P<comment>(?:(?!-->).)*?)[ ]*-->[ ]*\n(?:[ ]*\n)*)?"
    r"^(?P<indent>[ ]*)(?P<fence>`{3,}|~{3,})[ ]*(?P<language>\w*)[^\n]*\n"
    r"(?P<code>.*?)"
    r"^[ ]*(?P=fence)[ ]*$",
    re.MULTILINE | re.DOTALL,
)


def blocks_of(page: str, text: str) -> Iterator[Block]:
    for found in FENCE.finditer(text):
        indent = len(found["indent"])
        code = "".join(line[indent:] or "\n" for line in found["code"].splitlines(keepends=True))
        line = text.count("\n", 0, found.start("code")) + 1
        yield Block(page, line, found["language"].lower(), code, found["comment"] or "")


def chains_of(blocks: list[Block]) -> list[list[Block]]:
    """The python blocks, each together with those that continue it."""
    chains: list[list[Block]] = []
    for block in blocks:
        if block.language != "python":
            continue
        if not block.continues:
            chains.append([block])
            continue
        chain = chains[-1] if chains and chains[-1][0].page == block.page else []
        assert chain, f"{block} continues nothing"
        assert chain[0].not_run is None, f"{block} continues a block that is not run"
        chain.append(block)
    return chains


def script_of(chain: list[Block]) -> str:
    """The code with every line at its number in the page, so that tracebacks point there."""
    script = ""
    for block in chain:
        script += "\n" * (block.line - 1 - script.count("\n")) + block.code
    return script


def commands_of(code: str) -> Iterator[list[str]]:
    """The words of each simple command of a bash block, without assignments before it."""
    for line in code.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";&|"):
                if words:
                    yield words
                words = []
            elif words or not re.match(r"\w+=", word):
                words.append(word)


@cache
def make_targets() -> frozenset[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^([\w-]+):(?!=)", makefile, re.MULTILINE))


@cache
def strata_help(arguments: tuple[str, ...]) -> Result:
    return strata(*arguments, "--help", COLUMNS="200", NO_COLOR="1")


def complaint_about(command: list[str]) -> str | None:
    """Why this command cannot work, None when it can."""
    match command:
        case ["make", *words]:
            asked = {word for word in words if not word.startswith("-") and "=" not in word}
            unknown = asked - make_targets()
            return f"the Makefile has no target {sorted(unknown)}" if unknown else None
        case ["strata", *words]:
            return complaint_about_strata(words)
        case [program, *_] if program in OTHER_COMMANDS:
            return None
        case [program, *_]:
            return f"{program} is no command of ours; say <!-- not run: why --> or use another"
    return None


def complaint_about_strata(words: list[str]) -> str | None:
    result = strata_help(tuple(words))
    if result.returncode != 0:
        return result.stderr
    options = {word.partition("=")[0] for word in words if word.startswith("--")}
    unknown = [option for option in sorted(options) if option not in result.stdout]
    return f"--help knows no {', '.join(unknown)}" if unknown else None


BLOCKS = [
    block
    for page in PAGES
    for block in blocks_of(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8"))
]


@pytest.fixture(scope="module")
def coordinator_url() -> Iterator[str]:
    from dtruntime.testing import LocalCoordinator

    with LocalCoordinator() as coordinator:
        yield coordinator.url


def write_training_data(folder: Path) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    for number in range(2):
        pixels = np.random.default_rng(number).random((600, 16), dtype=np.float32)
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(pixels.ravel()), 16)
        table = pa.table({"pixels": vectors, "label": np.arange(600) % 10})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=100)


LONG = "docs/integrations.md"
"""Its examples import whole frameworks; they run with the long tests."""


def example(chain: list[Block]) -> Any:
    marks = [pytest.mark.long] if chain[0].page == LONG else []
    return pytest.param(chain, marks=marks, id=str(chain[0]))


@pytest.mark.parametrize("chain", [example(chain) for chain in chains_of(BLOCKS)])
def test_python_example_runs(
    chain: list[Block], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    first = chain[0]
    if first.not_run is not None:
        pytest.skip(first.not_run)
    url = request.getfixturevalue("coordinator_url")
    script = tmp_path / Path(first.page).name
    script.write_text(script_of(chain), encoding="utf-8")
    # Its own job: examples register the same names and must not meet each other.
    job = re.sub(r"\W+", "-", str(first))
    if "data/train" in script.read_text(encoding="utf-8"):
        write_training_data(tmp_path / "data" / "train")
    result = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        env={
            **os.environ,
            "COORDINATOR_URL": url,
            "STRATA_JOB": job,
            "STRATA_CACHE_DIR": str(tmp_path / "cache"),
            "JAX_PLATFORMS": "cpu",
        },
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, f"{first}\n{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "bash"], ids=str)
def test_bash_example_names_commands_that_exist(block: Block) -> None:
    if block.not_run is not None:
        pytest.skip(block.not_run)
    complaints = [
        f"{shlex.join(command)}: {complaint}"
        for command in commands_of(block.code)
        if (complaint := complaint_about(command))
    ]
    assert not complaints, "\n".join([str(block), *complaints])


def test_every_block_that_is_not_run_says_why() -> None:
    silent = [str(block) for block in BLOCKS if block.not_run == ""]
    assert not silent, f"write <!-- not run: REASON --> before {', '.join(silent)}"


PAGE = """\
Text.

```python
a = 1
```

<!-- continues -->
```python
assert a == 1
raise SystemExit(line)
```

<!-- not run: needs a GPU -->
```python
import cuda
```

<!-- not run -->
```bash
reboot
```

1. In a list:

   ```bash
   # comment
   $ cd work && RANK=0 make test ARGS="-k x"; strata demo |
     git log \\
       --oneline
   ```
"""


def test_blocks_are_found_with_their_lines_and_comments() -> None:
    blocks = list(blocks_of("page.md", PAGE))
    assert [(b.language, b.line, b.continues, b.not_run) for b in blocks] == [
        ("python", 4, False, None),
        ("python", 9, True, None),
        ("python", 15, False, "needs a GPU"),
        ("bash", 20, False, ""),
        ("bash", 26, False, None),
    ]


def test_continued_block_runs_after_its_predecessor_at_its_own_line() -> None:
    chains = chains_of(list(blocks_of("page.md", PAGE)))
    assert [len(chain) for chain in chains] == [2, 1]
    assert script_of(chains[0]).splitlines()[8] == "assert a == 1"


def test_commands_are_split_as_a_shell_would() -> None:
    block = list(blocks_of("page.md", PAGE))[-1]
    assert list(commands_of(block.code)) == [
        ["cd", "work"],
        ["make", "test", "ARGS=-k x"],
        ["strata", "demo"],
        ["git", "log", "--oneline"],
    ]


def test_unknown_commands_and_targets_are_reported() -> None:
    assert complaint_about(["make", "tset"])
    assert complaint_about(["strat", "demo"])
    assert complaint_about(["make", "-j2", "test", "ARGS=x"]) is None


def test_continuing_a_block_that_is_not_run_is_an_error() -> None:
    page = "<!-- not run: x -->\n```python\n1\n```\n<!-- continues -->\n```python\n2\n```\n"
    with pytest.raises(AssertionError, match="continues a block that is not run"):
        chains_of(list(blocks_of("page.md", page)))
