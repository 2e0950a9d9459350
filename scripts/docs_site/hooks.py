"""What the documentation site is made of besides the pages in docs/; loaded by mkdocs.yml.

References are made from the code they describe while the site is built, so that they cannot be
out of date. Files of the repository that pages link to become pages too.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from scripts.docs_site.diagrams import with_pictures
from scripts.docs_site.generated import GENERATED, ROOT
from scripts.docs_site.offline import external_resources
from scripts.docs_site.repository import PUBLISHED, Links, source_pages


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that do not lie in docs/."""
    for uri, make in GENERATED.items():
        files.append(File.generated(config, uri, content=make()))
    for path, uri in PUBLISHED.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text(encoding="utf-8")))
    for uri, text in source_pages(ROOT).items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Lead links out of docs/ to pages of the site, and put pictures in place of mermaid."""
    uri = page.file.src_uri
    return with_pictures(Links(ROOT).rewritten(markdown, uri), uri, ROOT / "docs")


def on_page_content(html: str, **_: Any) -> str:
    """Take out the colons that announce an example in a docstring."""
    return re.sub(r"\s*::</p>", ":</p>", html).replace("<p>:</p>", "")


def on_post_build(*, config: Any) -> None:
    """Refuse a site that would fetch anything from elsewhere."""
    found = external_resources(Path(config.site_dir))
    if found:
        raise PluginError("the site must work without a network, but has\n" + "\n".join(found))
