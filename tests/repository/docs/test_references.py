"""The generated references say what the code does, and leave nothing out."""

import argparse
import dataclasses
import importlib
import json
import re
import typing
from pathlib import Path

import dtruntime
from dtruntime.cli.main import build_parser
from dtruntime.config import ENVIRONMENT, Config
from dtruntime.coordinator.http.routes import document
from dtruntime.rpc.gen import coordinator_pb2
from scripts.docs_site import cli_reference, configuration_reference, grpc_reference, http_reference
from scripts.docs_site.diagrams import FOLDER, diagrams_in, with_pictures
from scripts.docs_site.not_run import not_run_page
from scripts.docs_site.offline import external_resources
from scripts.docs_site.repository import Links, source_pages

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"


def test_python_reference_has_every_exported_name_once() -> None:
    text = "".join(page.read_text() for page in (DOCS / "reference" / "python").glob("*.md"))
    named = re.findall(r"^::: dtruntime\.(\w+)$", text, re.MULTILINE)
    assert sorted(named) == sorted(set(vars(dtruntime)["__all__"]) - {"__version__"})


def test_python_reference_has_what_the_public_modules_export() -> None:
    text = "".join(page.read_text() for page in (DOCS / "reference" / "python").glob("*.md"))
    for module in ("checkpoint", "coordinator", "data", "sharding", "storage", "testing"):
        exported = set(importlib.import_module(f"dtruntime.{module}").__all__)
        named = set(re.findall(rf"^::: dtruntime\.{module}\.(\w+)$", text, re.MULTILINE))
        at_the_top = set(vars(dtruntime)["__all__"])
        assert exported - at_the_top <= named, module


def test_command_reference_has_every_command_and_option() -> None:
    page = cli_reference.page()
    for name, parser, _ in cli_reference.commands(build_parser()):
        assert re.search(rf"^#+ {re.escape(name)}$", page, re.MULTILINE), name
        for action in parser._actions:
            if action.help is not argparse.SUPPRESS and action.dest != "help":
                assert all(option in page for option in action.option_strings)


def test_configuration_reference_has_every_key_with_its_variable() -> None:
    page = configuration_reference.page()
    for section, kind in typing.get_type_hints(Config).items():
        assert f"## [{section}]" in page
        for field in dataclasses.fields(kind):
            assert f"| `{field.name}` |" in page
    for variable in ENVIRONMENT:
        assert f"`{variable}`" in page


def test_configuration_reference_has_the_texts_under_the_fields() -> None:
    @dataclasses.dataclass
    class Section:
        first: int = 1
        """What it is."""
        second: int = 2

    assert configuration_reference.field_docstrings(Section) == {"first": "What it is."}


def test_grpc_reference_agrees_with_the_generated_messages() -> None:
    text = (ROOT / "proto" / "coordinator.proto").read_text()
    found = {definition.name: definition for definition in grpc_reference.definitions(text)}
    described = coordinator_pb2.DESCRIPTOR
    for name, message in described.message_types_by_name.items():
        fields = {field.name: field.number for field in message.fields}
        assert {m.name: m.number for m in found[name].members} == fields, name
    for name, enumeration in described.enum_types_by_name.items():
        assert {m.name: m.number for m in found[name].members} == {
            value.name: value.number for value in enumeration.values
        }, name
    (service,) = described.services_by_name.values()
    assert [m.name for m in found[service.name].members] == [m.name for m in service.methods]
    assert len(found) == len(described.message_types_by_name) + len(
        described.enum_types_by_name
    ) + len(described.services_by_name)


def test_http_reference_has_every_path_and_object() -> None:
    page, described = http_reference.page(), json.loads(document())
    for path, operations in described["paths"].items():
        for method in operations:
            assert f"### {method.upper()} {path}\n" in page
    for name in described["components"]["schemas"]:
        assert f"### {name}\n" in page


def test_every_diagram_has_its_picture_and_no_picture_is_left_over() -> None:
    pictures = {path.name for path in (DOCS / FOLDER).glob("*.svg")}
    assert pictures == set(diagrams_in(DOCS)), "run make diagrams"


def test_diagram_without_a_picture_stays_text(tmp_path: Path) -> None:
    page = "```mermaid\nsequenceDiagram\n    A->>B: x\n```\n"
    assert with_pictures(page, "a.md", tmp_path) == page.replace("mermaid", "text")


def test_files_that_are_shown_in_tutorials_are_run_by_the_test_that_is_named() -> None:
    shown = re.compile(
        r"<!-- not run: the file is run by (\S+) -->\n```python\n--8<-- \"(\S+)\"\n```"
    )
    for page in sorted((DOCS / "tutorials").glob("*.md")):
        ((test, file),) = shown.findall(page.read_text())
        assert (ROOT / file).is_file()
        assert Path(file).name in (ROOT / test).read_text(), f"{page.name}: {test} does not run it"


def test_links_out_of_docs_become_pages_of_the_site() -> None:
    links, pages = Links(ROOT), source_pages(ROOT)
    text = "See [it](../examples/ddp_torchrun.py), `[no](x.py)`, [all](../CHANGELOG.md)."
    assert links.rewritten(text, "launchers.md") == (
        "See [it](source/examples/ddp_torchrun.py.md), `[no](x.py)`, [all](changelog.md)."
    )
    assert links.rewritten("[a](docs/data.md#jax)", "changelog.md") == "[a](data.md#jax)"
    assert "source/examples/ddp_torchrun.py.md" in pages


def test_examples_that_are_not_run_are_listed_with_their_reason() -> None:
    page = not_run_page(ROOT)
    assert "needs a Slurm cluster" in page
    assert page.count("\n| [") == sum(
        text.count("<!-- not run: ") for text in (path.read_text() for path in DOCS.rglob("*.md"))
    )


def test_what_a_page_would_load_from_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="https://example.com">fine</a><script src="/own.js"></script>'
        "<script src=https://cdn.example.com/x.js></script>"
        '<link href="//fonts.example.com/f.css" rel="stylesheet">'
    )
    (tmp_path / "b.css").write_text('@import "https://example.com/c.css"; a { color: red }')
    assert len(external_resources(tmp_path)) == 3
