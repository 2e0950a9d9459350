"""Links from pages to files of the repository."""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PUBLISHED = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmark-methods.md",
}
"""Pages of the repository that are pages of the site too, and where."""

LANGUAGES = {".py": "python", ".proto": "protobuf", ".yaml": "yaml", ".sh": "bash"}
LANGUAGES |= {".sbatch": "bash", ".toml": "toml", ".sql": "sql", ".ts": "typescript"}

LINK = re.compile(r"(?P<head>(?<!\\)\]\()(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?P<tail>\))")
CODE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1 *$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def is_external(target: str) -> bool:
    """Whether a link leads out of the repository."""
    return bool(re.match(r"[a-z][a-z0-9+.-]*:|//", target))


def without_code(markdown: str) -> str:
    """The text with its code blanked out, at the same length and with the same lines."""
    return CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), markdown)


def links_of(markdown: str) -> Iterator[re.Match[str]]:
    """The inline links and pictures of a page that lead to files, outside code."""
    return (
        found for found in LINK.finditer(without_code(markdown)) if not is_external(found["target"])
    )


class Links:
    """Turns paths in the repository into pages of the site."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def source_of(self, uri: str) -> PurePosixPath:
        """The file of the repository that a page of the site shows."""
        for path, published in PUBLISHED.items():
            if published == uri:
                return PurePosixPath(path)
        return PurePosixPath("docs") / uri

    def path_of(self, target: str, source: PurePosixPath) -> PurePosixPath:
        """The path in the repository that a link in ``source`` means."""
        return PurePosixPath(os.path.normpath(source.parent / target))

    def uri_of(self, path: PurePosixPath) -> str:
        """The page or file of the site for a path in the repository."""
        if str(path) in PUBLISHED:
            return PUBLISHED[str(path)]
        if path == PurePosixPath("README.md"):
            return "index.md"
        if path.parts[0] == "docs":
            return str(PurePosixPath(*path.parts[1:]))
        if (self._root / path).is_dir():
            return f"source/{path}/index.md"
        return f"source/{path}.md"

    def rewritten(self, markdown: str, uri: str) -> str:
        """The page with links that work in the site."""
        if uri.startswith("source/"):
            return markdown
        source, pieces, position = self.source_of(uri), [], 0
        for found in links_of(markdown):
            to = self.uri_of(self.path_of(found["target"], source))
            relative = os.path.relpath(to, str(PurePosixPath(uri).parent))
            pieces += [markdown[position : found.start("target")], relative]
            position = found.end("target")
        return "".join([*pieces, markdown[position:]])


def source_pages(root: Path) -> dict[str, str]:
    """A page for each file outside docs/ that some page links to, and for folders their list."""
    links, wanted = Links(root), set[PurePosixPath]()
    pages = [(path, root / path) for path in PUBLISHED]
    pages += [(str(page.relative_to(root)), page) for page in (root / "docs").rglob("*.md")]
    for name, page in pages:
        for found in links_of(page.read_text(encoding="utf-8")):
            path = links.path_of(found["target"], PurePosixPath(name))
            if (root / path).is_dir():
                wanted |= {path, *_files_in(root, path)}
            elif (root / path).is_file():
                wanted.add(path)
    made = {path: links.uri_of(path) for path in sorted(wanted)}
    return {uri: _page_of(root, path) for path, uri in made.items() if uri.startswith("source/")}


def _files_in(root: Path, folder: PurePosixPath) -> list[PurePosixPath]:
    return [
        folder / file.name
        for file in sorted((root / folder).iterdir())
        if file.suffix in LANGUAGES and file.is_file()
    ]


def _page_of(root: Path, path: PurePosixPath) -> str:
    if (root / path).is_dir():
        lines = [f"- [{file.name}]({file.name}.md)" for file in _files_in(root, path)]
        return "\n".join([f"# {path}/", "", *lines, ""])
    text = (root / path).read_text(encoding="utf-8").rstrip("\n")
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
    language = LANGUAGES.get(path.suffix, "text")
    return f"# {path}\n\n{fence}{language}\n{text}\n{fence}\n"
