"""Tenants within TLS: engines with tokens and certificates of a platform team's cluster, one of which reads by a grant
what another's engine has stored, and one whose token is read-only.

The cluster is another than the house's, on a Ray of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kvcluster
from kvcluster.config import ClientConfig
from kvcluster.runtime.auth import new_token, token_line
from tests.authority import Authority
from tests.vllm.e2e.run import ALWAYS, PATIENT, House, answers, differences, loaded, prompts

REQUESTS = 12
OWNER, TEAM = "public", "team-a"


def check(house: House) -> None:
    """Starts the cluster, and engines one after the other."""
    folder = house.folder / "tenants"
    issued = Authority(folder / "authority").issue("server", "coordinator", "shard")
    ca, cert, key = issued.files
    tokens = {who: new_token() for who in (OWNER, TEAM, "looks")}
    lines = [token_line(tokens[OWNER], OWNER), token_line(tokens[TEAM], TEAM)]
    lines += [token_line(tokens["looks"], OWNER, read_only=True), f"grant  {TEAM}  reads  {OWNER}", ""]
    (folder / "tokens").write_text("\n".join(lines), encoding="ascii")
    (folder / "tokens").chmod(0o600)
    config: dict[str, Any] = {
        "name": "kvcluster",
        "shard": {"ram_bytes": "256MiB"},
        "server": {"transports": ["grpc", "tcp"], "token_file": str(folder / "tokens")},
        "security": {"encryption": "tls", "ca_file": ca, "cert_file": cert, "key_file": key},
        "client": {"ca_file": ca},
    }
    with kvcluster.local(shards=2, config=config) as cluster:
        _engines(house, cluster.address, folder, ca, tokens)


def _engines(house: House, address: str, folder: Path, ca: str, tokens: dict[str, str]) -> None:
    asked = prompts(REQUESTS, seed=52)
    serial = {"prompts": asked, "serial": True, "sampling": {"max_tokens": 16}}
    model = house.model("llama")
    expected = answers(house.run({"model": model, "rounds": [serial]}))

    def seen(what: str, who: str, *, loads: bool, **settings: Any) -> dict[str, Any]:
        """Runs an engine, and adds a row."""
        token = folder / f"{who}.token"
        token.write_text(tokens[who], encoding="ascii")
        given = {"address": address, "token_file": str(token), "ca_file": ca, "report": True, "transports": ["tcp"]}
        given |= {"prefill_tokens_per_s": ALWAYS, **PATIENT, **settings}
        outcome = house.run({"model": model, "connector": given, "rounds": [serial]})
        differ, hits = differences(answers(outcome), expected), loaded(answers(outcome))
        told = f"{differ} of {REQUESTS} differ, {hits} loaded from the cluster"
        house.table.add(f"within TLS: {what}", told, differ == 0 and (hits >= REQUESTS // 2 or not loads))
        return outcome

    def stored(who: str) -> int:
        """The blocks that a tenant's engines have written, as its own status says."""
        with kvcluster.connect(address, house.spec, token=tokens[who], config=ClientConfig(ca_file=ca)) as client:
            return int(client.status()["counters"]["write_blocks"])

    seen("an owner's engine stores", OWNER, loads=False)
    before = stored(OWNER)
    seen("a read-only engine loads", "looks", loads=True)
    house.table.add("within TLS: blocks that it wrote", str(stored(OWNER) - before), stored(OWNER) == before > 0)
    seen("an engine of another tenant loads what it is granted", TEAM, loads=True, also_reads=OWNER)
    house.table.add("within TLS: blocks that it stored as its own", str(stored(TEAM)), stored(TEAM) > 0)
    seen("and finds without the grant", TEAM, loads=True)
