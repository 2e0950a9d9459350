"""The Grafana dashboard is one that Grafana can lay out."""

import json
from pathlib import Path
from typing import Any

DASHBOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[3] / "deploy" / "grafana" / "strata.json").read_text(encoding="utf-8")
)
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]


def test_dashboard_has_what_an_import_needs() -> None:
    assert DASHBOARD["uid"] == "strata"
    assert "id" not in DASHBOARD
    assert isinstance(DASHBOARD["schemaVersion"], int)
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {
        "datasource",
        "job",
    }
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)


def test_panels_do_not_overlap_and_are_not_too_wide() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_panel_asks_the_chosen_datasource() -> None:
    for panel in PANELS:
        if panel["type"] == "row":
            continue
        assert panel["targets"], panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
