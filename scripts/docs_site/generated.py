"""The pages that are made from code while the site is built."""

from collections.abc import Callable, Mapping
from pathlib import Path

from scripts.docs_site import cli_reference, configuration_reference, grpc_reference, http_reference
from scripts.docs_site.not_run import not_run_page

ROOT = Path(__file__).parents[2]

GENERATED: Mapping[str, Callable[[], str]] = {
    "reference/cli.md": cli_reference.page,
    "reference/configuration-keys.md": configuration_reference.page,
    "reference/grpc.md": lambda: grpc_reference.page(ROOT / "proto" / "coordinator.proto"),
    "reference/http.md": http_reference.page,
    "reference/not-run.md": lambda: not_run_page(ROOT),
}
"""Their places in the site, and what makes them."""
