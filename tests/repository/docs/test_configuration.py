"""The configuration reference says what the code does."""

import re
import tomllib
from pathlib import Path

from dtruntime.config import ENVIRONMENT, Config

PAGE = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text(encoding="utf-8")


def test_documented_file_is_the_complete_default_configuration() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    document = tomllib.loads(block)

    assert Config.from_mapping(document) == Config()
    for section, values in document.items():
        assert set(values) == set(getattr(Config(), section).__slots__)


def test_documented_environment_variables_are_those_that_are_read() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `\[(\w+)\] (\w+)` \|$", PAGE, flags=re.MULTILINE)

    assert {variable: (section, key) for variable, section, key in rows} == dict(ENVIRONMENT)
