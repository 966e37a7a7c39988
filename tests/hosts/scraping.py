"""Prometheus on a host of a cluster, with the configuration that docs/metrics.md prints, and what it knows.

Only paths, addresses and times differ from what is printed: it scrapes twice a second, and the alert rules have seconds
in place of minutes, and minutes in place of hours.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

from kvcluster.runtime.metrics import METRICS, MetricKind
from tests.deploy.alert_rules import RULES
from tests.hosts.hosts import ROOT, Cluster

DOCUMENT = ROOT / "docs" / "metrics.md"
_PORT = 9090
_TIMES = {"scrape_interval: 15s": "scrape_interval: 500ms", "evaluation_interval: 15s": "evaluation_interval: 500ms"}
_SHORTER = {"m": "s", "h": "m"}


def printed_files() -> dict[str, str]:
    """The files of Prometheus that the document prints, by their paths."""
    section = DOCUMENT.read_text(encoding="utf-8").partition("## Prometheus")[2].partition("\n## ")[0]
    return dict(re.findall(r"```yaml\n# (/etc/prometheus/\S+)\n(.*?)```", section, re.DOTALL))


def printed_metrics_settings() -> str:
    """The settings by which processes of several hosts serve metrics, as the document prints them."""
    section = DOCUMENT.read_text(encoding="utf-8").partition("## Prometheus")[2]
    found = re.search(r"```toml\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


def quick_rules() -> str:
    """The alert rules, with seconds in place of minutes and minutes in place of hours."""
    rules = RULES.read_text(encoding="utf-8")
    times = re.compile(r"(\[\d+|for: \d+)([mh])\b")
    text, changed = times.subn(lambda found: found[1] + _SHORTER[found[2]], rules)
    assert changed == len(re.findall(r"\[\d+\w|for: ", rules)), "a rule has a time of another form"
    return text


class Series(NamedTuple):
    """One value that Prometheus has. `labels`: sorted, without those of the target but `instance`."""

    name: str
    labels: tuple[tuple[str, str], ...]

    def is_of(self, metric: str, labels: Mapping[str, str]) -> bool:
        """Whether it is a series of this metric with these labels; of a histogram, the number of its values."""
        counted = metric + "_count" if METRICS[metric].kind is MetricKind.HISTOGRAM else metric
        return self.name == counted and labels.items() <= dict(self.labels).items()


class HostPrometheus:
    """A server on that host, asked over HTTP from within its network."""

    def __init__(self, cluster: Cluster, host: str) -> None:
        self._cluster, self._host = cluster, host

    def get(self, path: str, **arguments: str) -> Any:
        """The data of an answer; {} while the server does not answer."""
        url = f"http://127.0.0.1:{_PORT}/api/v1/{path}?{urlencode(arguments)}"

        def ask() -> Any:
            try:
                with urlopen(url, timeout=30) as answer:
                    return json.load(answer)["data"]
            except (URLError, ConnectionError):
                return {}

        return self._cluster.network.within(self._host, ask)

    def targets(self) -> dict[str, str]:
        """Whether each target is up, by its address without the port of the network: "one:9401"."""
        hosts = {address: host for host, address in self._cluster.network.addresses.items()}
        found = {}
        for target in self.get("targets").get("activeTargets", ()):
            address, _, port = target["labels"]["instance"].rpartition(":")
            found[f"{hosts[address]}:{port}"] = str(target["health"])
        return found

    def series(self) -> dict[Series, float]:
        """The newest value of every series of kvcluster that is not stale."""
        answer = self.get("query", query='{__name__=~"kvcluster_.*"}')
        found = {}
        for one in answer.get("result", ()):
            labels = {name: value for name, value in one["metric"].items() if name not in ("__name__", "job")}
            found[Series(one["metric"]["__name__"], tuple(sorted(labels.items())))] = float(one["value"][1])
        return found

    def types(self) -> dict[str, str]:
        """The type of each metric. Prometheus knows a counter by the name of its series, or without its `_total` where
        a target speaks OpenMetrics, as prometheus-client does."""
        types = {}
        for name, entries in self.get("metadata", limit="10000").items():
            kind = str(entries[0]["type"])
            types[f"{name.removesuffix('_total')}_total" if kind == "counter" else name] = kind
        return types

    def firing(self) -> set[str]:
        """The alerts that fire now."""
        return self._alerts('ALERTS{alertstate="firing"}')

    def fired(self, seconds: float) -> set[str]:
        """The alerts that fired in the last so many seconds."""
        return self._alerts(f'count_over_time(ALERTS{{alertstate="firing"}}[{int(seconds * 1e3)}ms])')

    def _alerts(self, query: str) -> set[str]:
        return {one["metric"]["alertname"] for one in self.get("query", query=query).get("result", ())}


@contextmanager
def scraping(program: str, cluster: Cluster, host: str, nodes: tuple[str, ...]) -> Iterator[HostPrometheus]:
    """Runs Prometheus there, over the head, these nodes with a shard each, and a worker on the same host."""
    folder = cluster.folder / "prometheus"
    folder.mkdir()
    names = {"HEAD": "head", "WORKER": host, **{f"NODE{number}": node for number, node in enumerate(nodes, 1)}}
    for path, text in printed_files().items():
        for name, where in names.items():
            text = re.sub(rf"\b{name}\b", cluster.network.addresses[where], text)
        for old, new in _TIMES.items():
            text = text.replace(old, new)
        (folder / Path(path).name).write_text(text.replace("/etc/prometheus", str(folder)), encoding="utf-8")
    (folder / RULES.name).write_text(quick_rules(), encoding="utf-8")
    shutil.copy(cluster.folder / "ca.crt", folder / "kvcluster-ca.crt")
    command = [program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{_PORT}", "--log.level=warn"]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(cluster.network.command(host, command), stdout=log, stderr=log) as process,
    ):
        try:
            yield HostPrometheus(cluster, host)
        finally:
            process.terminate()
