"""Measures loads from one, two and three nodes at once beside raw sockets between the same hosts. As root:

    .venv/bin/python -m benchmarks.hosts

The hosts are network namespaces on one switch (tests/hosts): a head, three nodes with a shard each, and a worker's
host, started by the commands of docs/operations.md. A prompt lies on each node. For n nodes each client on the worker's
host loads the prompts of n nodes at once, by one whole call a prompt, into vLLM's layout: hashes, lookup, ticket, pins,
the bytes over TCP, checksums. The baseline moves as many bytes over n raw sockets to the same hosts, one request a
prompt, answered page after page; nothing is verified. Each round runs every n both ways, in random order, with cold CPU
caches before each. In the end it prints a table in Markdown.

All hosts share the cores of one machine, which moves every byte through both ends and the switch. So rates do not grow
with nodes as on real ones; what can be read off is the ratio to raw sockets, and that nodes are drawn on evenly.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.request import urlopen

from benchmarks.checkout import ROOT, module_command
from benchmarks.specs import BY_PAGE_BYTES, MODELS, page_name
from kvcluster.cli.figures import progress
from tests.hosts.hosts import Cluster
from tests.hosts.netns import missing

NODES = ("one", "two", "spare")
CLUSTER, SOCKETS = "cluster", "sockets"
_METRICS_PORT = 9401
_MOST_PROMPTS = 24
"""A prompt lies where its hash says, so prompts are stored until each node has one."""

Case = tuple[str, int]
"""Loads from the cluster or by raw sockets, and of how many nodes."""


class PeerProcess:
    """A process of hosts_peers.py on a host."""

    def __init__(self, cluster: Cluster, host: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            cluster.network.command(host, module_command("benchmarks.hosts_peers", *arguments)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=cluster.environment,
        )
        self.answer()

    def ask(self, job: str, *arguments: object) -> Any:
        """Has the job done and returns what it returns."""
        self.begin(job, *arguments)
        return self.answer()

    def begin(self, job: str, *arguments: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([job, *arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a process of the benchmark has ended: see its error above")
        return json.loads(line)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Hosts:
    """The running cluster with its prompts, the raw servers and the clients."""

    def __init__(self, cluster: Cluster, clients: Sequence[PeerProcess]) -> None:
        self._cluster = cluster
        self._clients = clients

    def place_prompts(self) -> None:
        """Stores prompts until each node has one, which every client prepares to load."""
        shards = self._cluster.shards()
        seeds: dict[str, int] = {}
        for seed in range(_MOST_PROMPTS):
            where = {shards[shard] for shard in self._clients[0].ask("store", seed)}
            if len(where) == 1:
                seeds.setdefault(where.pop(), seed)
            if len(seeds) == len(NODES):
                break
        else:
            raise SystemExit(f"none of {_MOST_PROMPTS} prompts lies on one of the nodes: {seeds}")
        addresses = [self._cluster.network.addresses[node] for node in NODES]
        for client in self._clients:
            client.ask("prepare", [seeds[node] for node in NODES], addresses)

    def check(self) -> None:
        """Has every client compare what it loads with what was stored."""
        for client in self._clients:
            client.ask("check")

    def seconds(self, case: Case) -> float:
        """Loads once, and returns the time from the first client's beginning to the last one's end."""
        kind, nodes = case
        for client in self._clients:
            client.ask("sweep")
        for client in self._clients:
            client.begin(kind, nodes)
        spans: list[tuple[int, int]] = [client.answer() for client in self._clients]
        return (max(end for _, end in spans) - min(began for began, _ in spans)) / 1e9

    def loaded_bytes(self) -> dict[str, int]:
        """How many bytes each node's shard has sent to clients, by its own metrics."""
        found = {}
        for node in NODES:
            address = self._cluster.network.addresses[node]

            def scrape(address: str = address) -> str:
                with urlopen(f"http://{address}:{_METRICS_PORT}/metrics", timeout=30) as answer:
                    return str(answer.read(), "utf-8")

            lines = self._cluster.network.within("worker", scrape).splitlines()
            moved = (line for line in lines if line.startswith('kvcluster_moved_bytes_total{operation="load"'))
            found[node] = int(sum(float(line.rpartition(" ")[2]) for line in moved))
        return found


@contextmanager
def running(options: argparse.Namespace) -> Iterator[Hosts]:
    """Starts everything."""
    page_bytes = page_bytes_of(options.page)
    metrics = '\n[metrics]\nhost = "0.0.0.0"\nport = 9400\n'
    pool = str(max(2**30, _MOST_PROMPTS // 2 * options.pages * page_bytes))
    with ExitStack() as opened:
        cluster = opened.enter_context(Cluster(metrics, {"20GiB": pool}))
        cluster.up()
        for node in NODES:
            cluster.join(node)
        cluster.wait_shards(lambda shards: sorted(shards.values()) == sorted(NODES))
        for node in NODES:
            opened.callback(PeerProcess(cluster, node, "raw", options.pages * page_bytes).close)
        clients = []
        for _ in range(options.clients):
            clients.append(
                PeerProcess(cluster, "worker", "client", f"{cluster.address}:7070", page_bytes, options.pages)
            )
            opened.callback(clients[-1].close)
        yield Hosts(cluster, clients)


def page_bytes_of(model: str) -> int:
    """The size of a page of that model."""
    (nbytes,) = [nbytes for nbytes, spec in BY_PAGE_BYTES.items() if spec is MODELS[model]]
    return nbytes


def measured(hosts: Hosts, rounds: int) -> tuple[dict[Case, list[float]], dict[int, Counter[str]]]:
    """Returns the seconds of each case, one value a round, and how many bytes each node sent for loads of so many
    nodes. A round before the first that counts warms up."""
    cases = [(kind, nodes) for nodes in range(1, len(NODES) + 1) for kind in (CLUSTER, SOCKETS)]
    seconds: dict[Case, list[float]] = {case: [] for case in cases}
    drawn: dict[int, Counter[str]] = {nodes: Counter() for nodes in range(1, len(NODES) + 1)}
    for number in range(rounds + 1):
        for case in random.sample(cases, len(cases)):
            before = hosts.loaded_bytes()
            took = hosts.seconds(case)
            sent = Counter(hosts.loaded_bytes())
            sent.subtract(before)
            if number:
                seconds[case].append(took)
                if case[0] == CLUSTER:
                    drawn[case[1]].update(sent)
        progress(f"round {number} of {rounds}")
    return seconds, drawn


def table(
    seconds: Mapping[Case, Sequence[float]], drawn: Mapping[int, Mapping[str, int]], node_bytes: int
) -> Iterator[str]:
    """Yields the lines of the table. `node_bytes`: what all clients load of each node in a round."""
    heads = ("nodes", "loads GB/s", "raw sockets GB/s", "loads / raw", "loads, of one node", "raw, of one node")
    yield f"| {' | '.join(heads)} | bytes by node |"
    yield "|---" * (len(heads) + 1) + "|"
    rates = {case: [case[1] * node_bytes / took / 1e9 for took in of] for case, of in seconds.items()}
    for nodes, sent in drawn.items():
        ours, raw = rates[CLUSTER, nodes], rates[SOCKETS, nodes]
        ratios = [mine / theirs for mine, theirs in zip(ours, raw, strict=True)]
        grown = [
            statistics.median(rates[kind, nodes]) / statistics.median(rates[kind, 1]) for kind in (CLUSTER, SOCKETS)
        ]
        parts = " / ".join(f"{sent[node] / max(1, sum(sent.values())):.0%}" for node in NODES[:nodes])
        cells = (str(nodes), spread(ours), spread(raw), spread(ratios), *(f"{of:.2f}" for of in grown), parts)
        yield f"| {' | '.join(cells)} |"


def spread(values: Sequence[float]) -> str:
    """The median, with the least and the greatest."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
    """Prints what was run, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count (default 9)")
    parser.add_argument("--clients", type=int, default=1, help="processes that load the same prompts (default 1)")
    parser.add_argument("--pages", type=int, default=64, help="pages of each prompt, of 16 tokens each (default 64)")
    parser.add_argument("--page", choices=list(MODELS), default="llama-3-8b", help="whose pages (default llama-3-8b)")
    options = parser.parse_args()
    if why_not := missing():
        raise SystemExit(f"there can be no hosts on this machine: {why_not}")
    page_bytes = page_bytes_of(options.page)
    with running(options) as hosts:
        progress("storing a prompt on each node")
        hosts.place_prompts()
        hosts.check()
        seconds, drawn = measured(hosts, options.rounds)
        hosts.check()
    print(
        f"{os.cpu_count()} cores for all hosts; {options.clients} client(s), {options.pages} pages of "
        f"{page_name(page_bytes)} of each node, {options.rounds} rounds: median (least-greatest)\n"
    )
    print(*table(seconds, drawn, options.clients * options.pages * page_bytes), sep="\n")


if __name__ == "__main__":
    main()
