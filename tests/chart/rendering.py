"""`render(values)`: the objects of the chart, rendered by the real Helm library.

Helm renders as part of an installation, so it installs into an in-memory API server. The library lives in the
environment of `make chart`; from any other, a process of that environment does it:

    echo '{"redis": {"enabled": true}}' | .venv-chart/bin/python -m tests.chart.rendering
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
VALUES = ROOT / "helm" / "kvcluster" / "ci"
"""The values files that are installed by `make chart`."""

RELEASE, NAMESPACE = "cache", "llm"
CHART_PYTHON = ROOT / ".venv-chart" / "bin" / "python"


class RenderError(Exception):
    """What Helm, the chart or the API server says against these values."""


def render(values: Mapping[str, Any], *, release: str = RELEASE, namespace: str = NAMESPACE) -> list[dict[str, Any]]:
    """Returns all objects that an installation with these values writes, in the order of Helm's manifest. Raises
    RenderError if the values are refused."""
    if importlib.util.find_spec("helm_sdkpy") is None:
        return _rendered_elsewhere(values, release, namespace)
    return list(yaml.safe_load_all(installed(values, release=release, namespace=namespace)["manifest"]))


def installed(values: Mapping[str, Any], *, release: str = RELEASE, namespace: str = NAMESPACE) -> dict[str, Any]:
    """Returns Helm's record of an installation, its notes among it. Raises RenderError."""
    from tests.chart.api_server import ApiServer
    from tests.chart.helm import Helm, HelmError

    with ApiServer() as server:
        try:
            return Helm(server, release=release, namespace=namespace).install(values)
        except HelmError as error:
            raise RenderError(str(error)) from None


def values_of(name: str) -> dict[str, Any]:
    """Returns the values of a file of the chart's ci folder, such as "gpu"."""
    values: dict[str, Any] = yaml.safe_load((VALUES / f"{name}-values.yaml").read_text(encoding="utf-8")) or {}
    return values


def _rendered_elsewhere(values: Mapping[str, Any], release: str, namespace: str) -> list[dict[str, Any]]:
    if not CHART_PYTHON.exists():
        raise RenderError(f"{CHART_PYTHON} does not exist: `make .venv-chart/.installed` makes it")
    done = subprocess.run(
        [str(CHART_PYTHON), "-m", "tests.chart.rendering", release, namespace],
        input=json.dumps(dict(values)),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=120,
    )
    if done.returncode:
        raise RenderError(done.stderr.strip())
    objects: list[dict[str, Any]] = json.loads(done.stdout)
    return objects


def main() -> int:
    """Reads values as JSON, and prints the objects as JSON."""
    release, namespace = (sys.argv[1:] + [RELEASE, NAMESPACE][len(sys.argv) - 1 :])[:2]
    try:
        print(json.dumps(render(json.load(sys.stdin), release=release, namespace=namespace)))
    except RenderError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
