"""Every port of a cluster by every kind of credential, in the clear and within TLS: who is served, and who is not.

The columns come from `WAYS`, which has to have every row of the table of ports. That each method of a gRPC port is for
the right callers is tested in test_credentials_matrix.py, by the tables of methods.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import pytest

from kvcluster.config import Config, load
from kvcluster.config.ports import port_table
from kvcluster.core.ids import Epoch
from kvcluster.runtime import metrics_server
from kvcluster.transport.certificates import CertificateFiles, Certificates
from kvcluster.transport.credentials import Credentials
from kvcluster.transports import SPECS
from tests.authority import CLUSTER, Authority, Issued
from tests.runtime.listeners import SECRET, Listeners
from tests.runtime.port_attempts import ATTEMPTS, WAYS, Shown, tried

EVERYTHING = {
    "server": {"port": 7070, "report_port": 7071, "secret_file": "/secret"},
    "metrics": {"port": 9400},
    "events": {"endpoint": "tcp://127.0.0.1:5557", "replay": "tcp://127.0.0.1:5558"},
}
"""A configuration in which everything listens that can."""

SHARD = Epoch(6)
TENANTS = {"mine": "me", "yours": "you", "looks": "me", "reads": "reader", "operator's": "me", "commands": "-"}
OPERATORS = ("operator's", "commands")
READ_ONLY = ("looks",)
MADE_UP = "shard.6.0.0000"
TO_REPORT, TO_SHARD = "to report", "to this shard"
"""Stand for the tokens that the coordinator issues to another shard."""

CERTIFICATES = {
    "me": ("tenant/me",),
    "you": ("tenant/you",),
    "reader": ("tenant/reader",),
    "operator": ("tenant/me", "operator"),
    "commands": ("operator",),
    "shard": ("shard",),
    "events": ("events",),
    "coordinator": ("coordinator",),
    "no role": (),
    "expired": ("tenant/me", "operator", "shard", "events"),
    "revoked": ("tenant/me", "operator", "shard", "events"),
    "other CA": ("tenant/me", "operator", "shard", "events"),
    "other cluster": ("tenant/me", "operator", "shard", "events"),
}


class Row(NamedTuple):
    """What a client shows, and what becomes of it at each port. `token`, `certificate`: None for none. `trusts`: whose
    servers it trusts. `name`: which it expects in a server's certificate, "" for the address. `within_tls`: None for
    what the server speaks."""

    expected: str
    token: str | None = None
    certificate: str | None = None
    trusts: str = "authority"
    name: str = ""
    within_tls: bool | None = None


NOWHERE = "no  no  no  | no  no  | no  no  | no  no  | no  no  | no  no"

#                                 lookup       issue     grpc      tcp       metrics,  events
#                                  reserve      report     read      read     those     replay
#                                      drain                write     write    of shards
CLEAR = {
    "nothing":               Row("no  no  no  | no  no  | no  no  | no  no  | yes yes | yes yes"),
    "garbage":               Row("no  no  no  | no  no  | no  no  | no  no  | yes yes | yes yes", "garbage"),
    "made up for a shard":   Row("no  no  no  | no  no  | no  no  | no  no  | yes yes | yes yes", MADE_UP),
    "revoked":               Row("no  no  no  | no  no  | no  no  | no  no  | yes yes | yes yes", "my last one"),
    "right":                 Row("yes yes no  | no  no  | yes yes | yes yes | yes yes | yes yes", "mine"),
    "other tenant":          Row("own own no  | no  no  | own own | own own | yes yes | yes yes", "yours"),
    "read-only":             Row("yes no  no  | no  no  | yes no  | yes no  | yes yes | yes yes", "looks"),
    "by a grant":            Row("yes own no  | no  no  | yes own | yes own | yes yes | yes yes", "reads"),
    "operator":              Row("yes yes yes | no  no  | yes yes | yes yes | yes yes | yes yes", "operator's"),
    "operator of no tenant": Row("no  no  yes | no  no  | no  no  | no  no  | yes yes | yes yes", "commands"),
    "secret of the cluster": Row("no  no  no  | yes no  | no  no  | no  no  | yes yes | yes yes", SECRET),
    "shard to coordinator":  Row("no  no  no  | yes yes | no  no  | no  no  | yes yes | yes yes", TO_REPORT),
    "shard to shard":        Row("no  no  no  | no  no  | yes own | yes own | yes yes | yes yes", TO_SHARD),
    "right, within TLS":     Row(NOWHERE, "mine", within_tls=True),
}  # fmt: skip
"""Without TLS the ports of metrics and of events serve all who connect."""

WITHIN_TLS = {
    "nothing":               Row("no  no  no  | no  no  | no  no  | no  no  | yes yes | no  no"),
    "garbage":               Row("no  no  no  | no  no  | no  no  | no  no  | yes yes | no  no", "garbage", "no role"),
    "made up for a shard":   Row("no  no  no  | no  no  | no  no  | no  no  | yes yes | no  no", MADE_UP, "no role"),
    "revoked":               Row("no  no  no  | no  no  | no  no  | no  no  | yes yes | no  no", "my last one"),
    "right":                 Row("yes yes no  | no  no  | yes yes | yes yes | yes yes | no  no", "mine"),
    "other tenant":          Row("own own no  | no  no  | own own | own own | yes yes | no  no", "yours"),
    "read-only":             Row("yes no  no  | no  no  | yes no  | yes no  | yes yes | no  no", "looks"),
    "by a grant":            Row("yes own no  | no  no  | yes own | yes own | yes yes | no  no", "reads"),
    "operator":              Row("yes yes yes | no  no  | yes yes | yes yes | yes yes | no  no", "operator's"),
    "operator of no tenant": Row("no  no  yes | no  no  | no  no  | no  no  | yes yes | no  no", "commands"),
    "secret of the cluster": Row("no  no  no  | no  no  | no  no  | no  no  | yes yes | no  no", SECRET, "no role"),
    "shard to coordinator":  Row("no  no  no  | yes yes | no  no  | no  no  | yes yes | no  no", TO_REPORT, "shard"),
    "shard to shard":        Row("no  no  no  | no  no  | yes own | yes own | yes yes | no  no", TO_SHARD, "shard"),
    "certificate: right":    Row("no  no  no  | no  no  | no  no  | no  no  | yes yes | no  no", None, "me"),
    "certificate: operator": Row("no  no  no  | no  no  | no  no  | no  no  | yes yes | yes yes", None, "operator"),
    "certificate: shard":    Row("no  no  no  | yes no  | no  no  | no  no  | yes yes | no  no", None, "shard"),
    "certificate: events":   Row("no  no  no  | no  no  | no  no  | no  no  | yes yes | yes yes", None, "events"),
    "certificate: expired":  Row("yes yes no  | no  no  | yes yes | yes yes | yes yes | no  no", "mine", "expired"),
    "certificate: revoked":  Row("yes yes no  | no  no  | yes yes | yes yes | yes yes | no  no", "mine", "revoked"),
    "to report, revoked":    Row("no  no  no  | no  no  | no  no  | no  no  | yes yes | no  no", TO_REPORT, "revoked"),
    "to shard, revoked":     Row("no  no  no  | no  no  | yes own | yes own | yes yes | no  no", TO_SHARD, "revoked"),
    "plaintext":             Row(NOWHERE, "operator's", within_tls=False),
    "wrong CA":              Row(NOWHERE, "operator's", "operator", trusts="other CA"),
    "wrong name":            Row(NOWHERE, "operator's", "operator", name="other.example"),
}  # fmt: skip
"""Certificates are asked for at the ports for shards and of events alone; elsewhere one that is no good does no harm to
a token. Metrics are served to all who make a connection."""

WITH_CERTIFICATES = {
    "nothing":               Row("no  no  no  | no  no  | no  no  | no  no  | yes yes | no  no"),
    "token: right":          Row("no  no  no  | no  no  | no  no  | no  no  | yes yes | no  no", "mine"),
    "token: operator":       Row("no  no  no  | no  no  | no  no  | no  no  | yes yes | no  no", "operator's"),
    "right":                 Row("yes yes no  | no  no  | yes yes | yes yes | yes yes | no  no", None, "me"),
    "other tenant":          Row("own own no  | no  no  | own own | own own | yes yes | no  no", None, "you"),
    "read-only":             Row("yes no  no  | no  no  | yes no  | yes no  | yes yes | no  no", "looks", "no role"),
    "by a grant":            Row("yes own no  | no  no  | yes own | yes own | yes yes | no  no", None, "reader"),
    "operator":              Row("yes yes yes | no  no  | yes yes | yes yes | yes yes | yes yes", None, "operator"),
    "operator of no tenant": Row("no  no  yes | no  no  | no  no  | no  no  | yes yes | yes yes", None, "commands"),
    "events":                Row("no  no  no  | no  no  | no  no  | no  no  | yes yes | yes yes", None, "events"),
    "shard":                 Row("no  no  no  | yes no  | no  no  | no  no  | yes yes | no  no", None, "shard"),
    "shard to coordinator":  Row("no  no  no  | yes yes | no  no  | no  no  | yes yes | no  no", TO_REPORT, "shard"),
    "shard to shard":        Row("no  no  no  | no  no  | yes own | yes own | yes yes | no  no", TO_SHARD, "shard"),
    "wrong role":            Row("no  no  no  | no  no  | no  no  | no  no  | yes yes | no  no", None, "coordinator"),
    "no role":               Row("no  no  no  | no  no  | no  no  | no  no  | yes yes | no  no", None, "no role"),
    "no role, right token":  Row("yes yes no  | no  no  | yes yes | yes yes | yes yes | no  no", "mine", "no role"),
    "no role, garbage":      Row("no  no  no  | no  no  | no  no  | no  no  | yes yes | no  no", "garbage", "no role"),
    "right, garbage":        Row("no  no  no  | no  no  | no  no  | no  no  | yes yes | no  no", "garbage", "me"),
    "other cluster":         Row("no  no  no  | no  no  | no  no  | no  no  | yes yes | no  no", None, "other cluster"),
    "other CA":              Row("no  no  no  | no  no  | no  no  | no  no  | yes yes | no  no", "mine", "other CA"),
    "expired":               Row("no  no  no  | no  no  | no  no  | no  no  | yes yes | no  no", "mine", "expired"),
    "revoked":               Row("no  no  no  | no  no  | no  no  | no  no  | yes yes | no  no", None, "revoked"),
    "revoked, right token":  Row("yes yes no  | no  no  | yes yes | yes yes | yes yes | no  no", "mine", "revoked"),
    "to report, revoked":    Row("no  no  no  | no  no  | no  no  | no  no  | yes yes | no  no", TO_REPORT, "revoked"),
    "to shard, revoked":     Row("no  no  no  | no  no  | no  no  | no  no  | yes yes | no  no", TO_SHARD, "revoked"),
    "plaintext":             Row(NOWHERE, "operator's", within_tls=False),
    "wrong CA":              Row(NOWHERE, "operator's", "operator", trusts="other CA"),
    "wrong name":            Row(NOWHERE, "operator's", "operator", name="other.example"),
}  # fmt: skip
"""A token of a tenant is revoked by its own line, and goes on beside a certificate that was revoked; the token of a
shard, which has no line, ends with its certificate."""


class World:
    """The certificates of the tables, and listeners that know the tokens and what is revoked."""

    def __init__(self, house: ExitStack, folder: Path, *, tls: bool = False, client_certificates: bool = False) -> None:
        authorities = {name: Authority(folder / name.replace(" ", "-"), "a") for name in ("authority", "other CA")}
        self._authority = authorities["authority"]
        self._cas = {name: authority.ca for name, authority in authorities.items()}
        self._issued: dict[str, Issued] = {}
        for name, roles in CERTIFICATES.items():
            authority = authorities.get(name, self._authority)
            cluster, days = ("other" if name == "other cluster" else CLUSTER), (-0.5 if name == "expired" else 60)
            to = name.replace(" ", "-")
            self._issued[name] = authority.issue(to, *roles, names=("client.example",), cluster=cluster, days=days)
        own = self._authority.issue("server", "coordinator", "shard") if tls else None
        self._is_tls = tls
        self.listeners = Listeners(house, folder, own, client_certificates=client_certificates)
        self.listeners.admit(TENANTS, OPERATORS, (self._issued["revoked"].fingerprint,), READ_ONLY)
        self.listeners.now += 1.0
        proves = self._credentials(Row("", None if tls else SECRET, "shard" if tls else None))
        self._of_shard = dict(zip((TO_REPORT, TO_SHARD), self.listeners.shard_tokens(SHARD, proves), strict=True))

    def shown(self, row: Row) -> Shown:
        """What the client of a row shows."""
        return Shown(self._credentials(row), SHARD)

    def _credentials(self, row: Row) -> Credentials:
        token = self._of_shard[row.token] if row.token in (TO_REPORT, TO_SHARD) else row.token
        if not (self._is_tls if row.within_tls is None else row.within_tls):
            return Credentials(token)
        issued = self._issued[row.certificate] if row.certificate is not None else None
        return Credentials(token, certificates_of(self._cas[row.trusts], issued), row.name)


def certificates_of(ca: Path, issued: Issued | None) -> Certificates:
    """Those of a client that trusts this authority and shows that certificate, also one that the product's own client
    would not load, as every server refuses it."""
    certificates = Certificates(CertificateFiles(str(ca)))
    if issued is not None:
        loaded, (_, cert, key) = certificates.now(), issued.files
        loaded.cert, loaded.key = Path(cert).read_bytes(), Path(key).read_bytes()
        loaded.client.load_cert_chain(cert, key)
    return certificates


@pytest.fixture(scope="module")
def patience() -> Iterator[None]:
    """The metrics port ends what is no request after 5 s; here sooner."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(metrics_server, "REQUEST_S", 2.0)
        yield


@pytest.fixture(scope="module")
def clear(patience: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as house:
        yield World(house, tmp_path_factory.mktemp("clear"))


@pytest.fixture(scope="module")
def within_tls(patience: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as house:
        yield World(house, tmp_path_factory.mktemp("tls"), tls=True)


@pytest.fixture(scope="module")
def with_certificates(patience: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as house:
        yield World(house, tmp_path_factory.mktemp("mutual"), tls=True, client_certificates=True)


def check(world: World, row: Row) -> None:
    """Tries every port with what the row shows."""
    expected = dict(zip(ATTEMPTS, row.expected.replace("|", " ").split(), strict=True))
    shown = world.shown(row)
    assert {name: tried(way, world.listeners, shown).value for name, way in ATTEMPTS.items()} == expected


@pytest.mark.parametrize("name", CLEAR)
def test_in_the_clear_each_port_serves_whom_it_is_for(name: str, clear: World) -> None:
    check(clear, CLEAR[name])


@pytest.mark.parametrize("name", WITHIN_TLS)
def test_within_tls_each_port_serves_whom_it_is_for(name: str, within_tls: World) -> None:
    check(within_tls, WITHIN_TLS[name])


@pytest.mark.parametrize("name", WITH_CERTIFICATES)
def test_where_clients_show_certificates_each_port_serves_whom_it_is_for(name: str, with_certificates: World) -> None:
    check(with_certificates, WITH_CERTIFICATES[name])


# ------------------------------------------------------------------------------------------------ nothing is left out


def test_every_port_of_the_table_is_tried_and_no_other() -> None:
    uses = port_table(load(overrides=EVERYTHING))
    assert {(use.setting, use.listener) for use in uses if not use.ray} == set(WAYS)


def test_every_setting_that_names_a_port_is_in_the_table() -> None:
    named = {
        f"{section.name}.{field.name}"
        for section in fields(Config)
        if hasattr(part := getattr(Config(), section.name), "__dataclass_fields__")
        for field in fields(part)
        if field.name in ("endpoint", "replay") or field.name.rpartition("_")[2] in ("port", "ports")
    }
    assert named == {use.setting for use in port_table(load(overrides=EVERYTHING))}


def test_every_transport_that_listens_on_a_port_is_tried(clear: World) -> None:
    """One for workers of the same host alone has no port."""
    ports = {spec.name for spec in SPECS if not spec.same_host}
    tried = {name.partition(" ")[0] for name in WAYS["server.shard_ports", "shards: grpc and tcp"]}
    assert tried == ports and ports <= clear.listeners.addresses.keys()
