"""`make wheel-vllm`: from nothing to two vLLM servers that share a cache, with the built wheel and by the commands of
docs/vllm.md, and how long it takes.

`python -m tests.wheels.vllm WHEEL` makes an environment for the cluster and one for the engines, starts a cluster and
two servers, and asks both the same. The second must load what the first has computed, and both must answer with the
very logprobs of a server without a connector, which is asked afterwards. The clock runs from the first `pip install` to
the second server's answer. vLLM is its build for CPUs (tools/vllm_env.sh), the model is tiny and made here.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.vllm.e2e.engine import ENVIRONMENT
from tests.vllm.e2e.run import ALWAYS, BLOCK, Table, eventually, prompts
from tests.vllm.e2e.servers import Server, healthy, metric
from tests.wheels.environments import Fresh, fresh

ROOT = Path(__file__).parents[2]
MODEL = "llama"
UP_S = 300.0
PROMPT = prompts(2, seed=1, longest=700)[1]
SERVE = ("--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK), "--max-model-len", "1024")
"""What a CPU and a model this small ask for."""


@dataclass
class Try:
    """Both environments, and the folder of everything else."""

    cluster: Fresh
    engines: Fresh
    folder: Path

    @contextmanager
    def running_cluster(self) -> Iterator[str]:
        """A cluster as `kvcluster up` starts it; gives its address."""
        port = str(free_port())
        self.cluster.says("kvcluster", "up", "--shards", "2", "--ram-bytes", "256MiB", "--port", port)
        try:
            yield f"127.0.0.1:{port}"
        finally:
            self.cluster.says("kvcluster", "down", "--port", port)

    @contextmanager
    def serving(self, address: str | None) -> Iterator[Server]:
        """A server with the connector, or without one; ended at the end."""
        port = free_port()
        said = self.folder / f"server-{port}.txt"
        # `vllm serve` asks for a package named vllm, which the build for CPUs is not.
        command = [self.engines.program("python"), "-m", "vllm.entrypoints.openai.api_server", *SERVE]
        command += ["--model", str(self.folder / "models" / MODEL), "--served-model-name", MODEL]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        if address is not None:
            extra = {"address": address, "report": True, "prefill_tokens_per_s": ALWAYS}
            command += ["--kv-transfer-config", json.dumps(CONNECTOR | {"kv_connector_extra_config": extra})]
        environment = os.environ | ENVIRONMENT | {"VLLM_RPC_BASE_PATH": str(self.folder)}
        environment.pop("PYTHONPATH", None)
        with said.open("wb") as file:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield Server(f"http://127.0.0.1:{port}", process, said)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


CONNECTOR: dict[str, Any] = {
    "kv_connector": "KVClusterConnector",
    "kv_connector_module_path": "kvcluster.engines.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


def ask(server: Server) -> dict[str, Any]:
    """Asks the one question, and returns the ids, their logprobs, and what the connector reports."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "logprobs": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        data=json.dumps(body | {"return_token_ids": True}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        told = json.load(answer)
    (choice,) = told["choices"]
    report = (told.get("kv_transfer_params") or {}).get("kvcluster") or {}
    return {"ids": choice["token_ids"], "logprobs": choice["logprobs"]["token_logprobs"], "report": report}


def blocks(one: Try, address: str) -> int:
    """How many blocks the cluster holds."""
    status = json.loads(one.cluster.says("kvcluster", "status", "--json", "--address", address))
    return int(status["blocks"])


def install(wheel: Path, folder: Path) -> Try:
    """Both environments of docs/vllm.md, "Set-up"."""
    cluster = fresh(folder / "cluster")
    cluster.install(f"{wheel}[cluster]")
    subprocess.run(
        [ROOT / "tools/vllm_env.sh", folder / "engines", "--client", wheel],
        env=os.environ | {"PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        check=True,
    )
    return Try(cluster, Fresh(folder / "engines"), folder)


def check(wheel: Path, folder: Path, minutes: float, table: Table) -> None:
    """Every step, and a row of the table for what it must show."""
    began = time.monotonic()

    def clock() -> str:
        return f"after {(time.monotonic() - began) / 60:.1f} min"

    one = install(wheel, folder)
    where = one.engines.says("python", "-c", "import kvcluster; print(kvcluster.__file__)")
    table.add("installed from the wheel", clock(), where.startswith(str(one.engines.folder)))
    one.engines.says("python", "-I", str(ROOT / "tests/vllm/e2e/models.py"), str(folder / "models"))
    with one.running_cluster() as address, ExitStack() as stack:
        two = [stack.enter_context(one.serving(address)) for _ in range(2)]
        for server in two:
            eventually(lambda server=server: healthy(server), UP_S, f"{server.url} is up: {server.text()[-2000:]}")
        table.add("a cluster and two servers are up", clock(), True)
        first = ask(two[0])
        whole = len(PROMPT) // BLOCK
        eventually(lambda: blocks(one, address) >= whole, 60, f"{whole} blocks are stored")
        second = ask(two[1])
        taken = time.monotonic() - began
        hits = metric(two[1], "vllm:external_prefix_cache_hits_total")
        loaded = second["report"].get("loaded_tokens", 0)
        table.add(
            "the second server loads what the first computed",
            f"{hits:.0f} external hits, {loaded} of {len(PROMPT)} tokens loaded",
            hits > 0 and loaded > 0,
        )
    with one.serving(None) as plain:
        eventually(lambda: healthy(plain), UP_S, f"{plain.url} is up: {plain.text()[-2000:]}")
        right = ask(plain)
    for name, answer in (("first", first), ("second", second)):
        same = (answer["ids"], answer["logprobs"]) == (right["ids"], right["logprobs"])
        distinct = len(set(right["ids"]))  # an answer of one token over and over would show nothing
        table.add(
            f"the {name} server's logprobs beside no connector's",
            f"{len(right['ids'])} tokens, {distinct} of them distinct: {'identical' if same else 'DIFFERENT'}",
            same and distinct > 1,
        )
    table.add(
        "from the first pip install to the second server's answer",
        f"{taken / 60:.1f} min, where {minutes:g} are allowed",
        taken <= 60 * minutes,
    )


def main() -> int:
    """Returns 1 where anything is not as it must be."""
    parser = argparse.ArgumentParser(prog="make wheel-vllm", description=__doc__)
    parser.add_argument("wheel", type=Path, help="the wheel, for this Python")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long it may take (default 10)")
    parser.add_argument("--keep", action="store_true", help="keep the environments, 5 GB")
    options = parser.parse_args()
    table = Table()
    folder = Path(tempfile.mkdtemp(prefix="kvwheel-"))
    try:
        check(options.wheel.absolute(), folder, options.minutes, table)
    finally:
        if options.keep:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    print(table.text())
    return 0 if table.ok else 1


if __name__ == "__main__":
    sys.exit(main())
