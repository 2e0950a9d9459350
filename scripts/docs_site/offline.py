"""Finds what a built site would fetch from elsewhere."""

import re
from pathlib import Path

LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio)\b[^>]*?\bsrc=["']?(?P<src>(?:https?:)?//[^"'\s>]+)"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preload|icon|preconnect|dns-prefetch))"""
    r"""[^>]*?\bhref=["']?(?P<href>(?:https?:)?//[^"'\s>]+)""",
    re.IGNORECASE,
)
IMPORTED = re.compile(r"""(?:@import|url\()\s*["']?((?:https?:)?//[^"'\s)]+)""", re.IGNORECASE)


def external_resources(site: Path) -> list[str]:
    """``page: address`` for each thing that a browser would load from another host."""
    found = []
    for page in sorted(site.rglob("*.html")):
        found.extend(
            f"{page.relative_to(site)}: {match['src'] or match['href']}"
            for match in LOADED.finditer(page.read_text(encoding="utf-8"))
        )
    for sheet in sorted(site.rglob("*.css")):
        found.extend(
            f"{sheet.relative_to(site)}: {match[1]}"
            for match in IMPORTED.finditer(sheet.read_text(encoding="utf-8"))
        )
    return found
