"""What is made of other files is current: the schema, the README, and the copies of rules and dashboards."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import yaml

from tests.chart.api_server import ApiServer
from tests.chart.helm import CHART, Helm
from tests.chart.rendering import ROOT
from tools import chart_readme, chart_schema


def test_the_schema_is_made_of_the_values_and_the_settings_of_the_program() -> None:
    assert chart_schema.SCHEMA.read_text(encoding="utf-8") == chart_schema.text(), "python -m tools.chart_schema"


def test_the_readme_is_made_of_the_comments_in_the_values() -> None:
    assert chart_readme.README.read_text(encoding="utf-8") == chart_readme.text(), "python -m tools.chart_readme"


def test_every_value_is_described() -> None:
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    described = [each.name for each in chart_readme.values(text)]

    def leaves(tree: object, at: str) -> list[str]:
        if at in described or not isinstance(tree, dict):
            return [at]
        return [leaf for name, below in tree.items() for leaf in leaves(below, f"{at}.{name}".lstrip("."))]

    assert set(leaves(yaml.safe_load(text), "")) <= set(described)


def test_a_package_carries_the_rules_and_dashboards_of_deploy(tmp_path: Path) -> None:
    with ApiServer() as server:
        archive = Helm(server).package(tmp_path)
    sources = {"files/alerts.yaml": ROOT / "deploy/prometheus/alerts.yaml"}
    sources |= {f"files/dashboards/{path.name}": path for path in (ROOT / "deploy/grafana").glob("*.json")}
    assert len(sources) >= 2
    with tarfile.open(archive) as packed:
        for name, source in sources.items():
            member = packed.extractfile(f"kvcluster/{name}")
            assert member is not None and member.read() == source.read_bytes()
        assert not [each.name for each in packed if "/ci/" in each.name]


@pytest.mark.parametrize("chart", [CHART, CHART.with_name("kvcluster-engine")])
def test_the_charts_have_the_release_of_the_program(chart: Path) -> None:
    from kvcluster.release import __version__

    about, of_program = (yaml.safe_load((each / "Chart.yaml").read_text(encoding="utf-8")) for each in (chart, CHART))
    assert about["appVersion"] == __version__ and about["version"] == of_program["version"]
