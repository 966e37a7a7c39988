"""What the program, Ray and the documents know: options, variables, paths, settings and metrics, for the checks."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from kvcluster.runtime.metrics import METRICS
from tests.deploy.alert_rules import RELEASE

ROOT = Path(__file__).parents[2]
_RAY = ROOT / ".venv" / "bin" / "ray"


@cache
def ray_flags() -> frozenset[str]:
    """The options of `ray start`."""
    done = subprocess.run([str(_RAY), "start", "--help"], capture_output=True, text=True, check=True, timeout=120)
    return frozenset(re.findall(r"^ +(--[a-z-]+)", done.stdout, re.MULTILINE))


@cache
def ray_variables() -> frozenset[str]:
    """The names of environment variables that Ray's Python code speaks of."""
    (package,) = (ROOT / ".venv" / "lib").glob("python3*/site-packages/ray")
    texts = [path.read_text(encoding="utf-8") for path in (package / "_private").rglob("*.py")]
    return frozenset(re.findall(r"\bRAY_[A-Za-z_]+", "\n".join(texts)))


@cache
def served_paths() -> frozenset[str]:
    """The paths that a process answers over HTTP."""
    source = (ROOT / "kvcluster/runtime/metrics_server.py").read_text(encoding="utf-8")
    return frozenset(re.findall(r'"(/[a-z]+)"', source))


@cache
def connector_settings() -> frozenset[str]:
    """The keys of kv_connector_extra_config; the package itself needs torch."""
    tree = ast.parse((ROOT / "kvcluster/engines/vllm/settings.py").read_text(encoding="utf-8"))
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ConnectorSettings"]
    return frozenset(n.target.id for n in found.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name))


def documented_transfer_config() -> dict[str, Any]:
    """The setting that docs/vllm.md prints."""
    found = re.search(r"--kv-transfer-config '(\{.*?\}\})'", (ROOT / "docs/vllm.md").read_text("utf-8"), re.DOTALL)
    assert found is not None
    config: dict[str, Any] = json.loads(found[1])
    return config


def metrics_in(text: str) -> set[str]:
    """Returns the names of our metrics in a text, histograms by their own."""
    names = set(re.findall(r"\bkvcluster_[a-z_]+", text)) - {"kvcluster_shard", RELEASE}
    ends = ("_bucket", "_sum", "_count")
    return {name if name in METRICS else re.sub(rf"({'|'.join(ends)})$", "", name) for name in names}
