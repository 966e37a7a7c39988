"""The real Helm library: lint, package, install, upgrade, uninstall, each as a plain function call."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import helm_sdkpy
from helm_sdkpy.exceptions import HelmError

from tests.chart.api_server import ApiServer

CHART = Path(__file__).parents[2] / "helm" / "kvcluster"
RELEASE, NAMESPACE = "cache", "llm"

__all__ = ["CHART", "NAMESPACE", "RELEASE", "Helm", "HelmError"]


class Helm:
    """Helm as a client of that server. All methods raise HelmError with what Helm says."""

    def __init__(self, server: ApiServer, *, release: str = RELEASE, namespace: str = NAMESPACE) -> None:
        self._config = helm_sdkpy.Configuration(namespace=namespace, kubeconfig=server.kubeconfig)
        self._release = release

    def lint(self, chart: Path = CHART) -> None:
        """Lints with the chart's own values."""
        asyncio.run(helm_sdkpy.Lint(self._config).run(str(chart)))

    def package(self, into: Path, chart: Path = CHART) -> Path:
        """Returns the archive."""
        return Path(asyncio.run(helm_sdkpy.Package(self._config).run(str(chart), str(into))))

    def install(self, values: Mapping[str, Any], chart: Path = CHART) -> dict[str, Any]:
        """Returns Helm's record of the release; "manifest" and "info" among it."""
        action = helm_sdkpy.Install(self._config)
        return asyncio.run(
            action.run(self._release, str(chart), dict(values), wait=False, timeout=30, server_side_apply=True)
        )

    def upgrade(self, values: Mapping[str, Any], chart: Path = CHART, *, reuse_values: bool = False) -> dict[str, Any]:
        """As `install`, of the release that is there. `reuse_values`: with the values of before, its defaults among
        them, in place of the chart's."""
        action = helm_sdkpy.Upgrade(self._config)
        how: dict[str, Any] = {"wait": False, "timeout": 30, "server_side_apply": True, "reuse_values": reuse_values}
        return asyncio.run(action.run(self._release, str(chart), dict(values), **how))

    def uninstall(self) -> None:
        asyncio.run(helm_sdkpy.Uninstall(self._config).run(self._release, wait=False, timeout=30))
