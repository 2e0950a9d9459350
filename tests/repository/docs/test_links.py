"""Every link of the documentation leads somewhere."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from scripts.docs_site.generated import GENERATED
from scripts.docs_site.repository import without_code

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"]
)
LINK = re.compile(r"(?<!\\)\]\(\s*(?P<target>[^)\s]+)\s*\)")


def targets_of(page: Path) -> Iterator[tuple[int, str]]:
    text = without_code(page.read_text(encoding="utf-8"))
    for found in LINK.finditer(text):
        yield text.count("\n", 0, found.start()) + 1, found["target"]


@cache
def anchors_of(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as both mkdocs and GitHub make them."""
    anchors: dict[str, int] = {}
    text = re.sub(r"^ *(`{3,}).*?^ *\1 *$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for heading in re.findall(r"^#{1,6} +(.+?) *$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", lambda found: found[1] or "", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")
        count = anchors.get(slug, 0)
        anchors[slug] = count + 1
    return frozenset(anchors)


def complaint_about(page: Path, target: str) -> str | None:
    parts = urlsplit(target)
    if parts.scheme:
        is_fine = parts.scheme == "https" and "." in parts.netloc and " " not in target
        return None if is_fine else "write https://HOST/..."
    to = (page.parent / parts.path).resolve() if parts.path else page
    if not to.is_relative_to(ROOT):
        return "leads out of the repository"
    if not to.exists():
        in_site = to.relative_to(ROOT / "docs").as_posix() if "docs" in to.parts else ""
        return None if in_site in GENERATED else "there is no such file"
    if parts.fragment and to.suffix == ".md" and parts.fragment not in anchors_of(to):
        return f"{to.name} has no heading for that: {', '.join(sorted(anchors_of(to)))}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    complaints = [
        f"{page.name}:{line}: {target}: {complaint}"
        for line, target in targets_of(page)
        if (complaint := complaint_about(page, target))
    ]
    assert not complaints, "\n".join(complaints)


def test_broken_links_are_found() -> None:
    page = ROOT / "docs" / "data.md"
    assert complaint_about(page, "nothing.md")
    assert complaint_about(page, "configuration.md#nothing")
    assert complaint_about(page, "../../elsewhere.md")
    assert complaint_about(page, "http://example.com")
    assert complaint_about(page, "configuration.md#cache-of-remote-data") is None
