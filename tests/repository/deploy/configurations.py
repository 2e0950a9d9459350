"""Compose files and manifests as they are in the repository, and what the code expects of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from dtruntime import Run
from dtruntime.config import ENVIRONMENT

ROOT = Path(__file__).parents[3]
K8S = ROOT / "k8s"
GRACE_SECONDS: float = inspect.signature(Run).parameters["grace_seconds"].default

# Read by the code directly, by the storage clients, or by Kubernetes itself.
_OTHERS = {"STRATA_LOG", "STRATA_LOG_FORMAT", "JOB_COMPLETION_INDEX"}
_STORES = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"}


def known_variables() -> set[str]:
    """The environment variables that Strata reads, as its documentation lists them."""
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE))
    return documented | set(ENVIRONMENT) | _OTHERS | _STORES


def documents(path: Path) -> list[Any]:
    return [one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one]


def compose(name: str) -> dict[str, Any]:
    (document,) = documents(ROOT / name)
    return dict(document)


def base(kind: str) -> dict[str, Any]:
    """The one resource of a kind in the base."""
    found = [
        document
        for path in (K8S / "base").glob("*.yaml")
        for document in documents(path)
        if document["kind"] == kind
    ]
    (only,) = found
    return dict(only)


def mappings_in(value: Any) -> Iterator[dict[str, Any]]:
    """All mappings at any depth."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    for part in value if isinstance(value, list) else ():
        yield from mappings_in(part)


def dockerfile_ports() -> set[int]:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (line,) = re.findall(r"^EXPOSE (.+)$", text, flags=re.MULTILINE)
    return {int(port) for port in line.split()}
