"""What a client shows, by its settings and its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcluster.config import ClientConfig
from kvcluster.errors import ConfigError
from kvcluster.transport.credentials import CA_FILE, CERT_FILE, ENCRYPTION, SERVER_NAME, client_credentials
from tests.authority import Authority

ELSEWHERE = "10.0.0.5:7070"


@pytest.fixture
def ca(tmp_path: Path) -> str:
    return str(Authority(tmp_path).ca)


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (CA_FILE, CERT_FILE, ENCRYPTION, SERVER_NAME):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("address", [ELSEWHERE, "cache.example:7070", "[fd00::5]:7070"])
def test_nothing_is_sent_to_another_machine_before_it_is_said_how(address: str) -> None:
    with pytest.raises(ConfigError, match="nothing says how the connection is encrypted"):
        client_credentials(address, "mine", ClientConfig())
    for named in ("network", "none"):
        assert client_credentials(address, "mine", ClientConfig(encryption=named)).certificates is None


@pytest.mark.parametrize("address", ["127.0.0.1:7070", "localhost:7070", "[::1]:7070"])
def test_on_loopback_nothing_need_be_said(address: str) -> None:
    shown = client_credentials(address, "mine", ClientConfig())
    assert (shown.token, shown.certificates) == ("mine", None)


def test_an_authority_means_tls_whatever_the_environment_says(ca: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENCRYPTION, "none")
    assert client_credentials(ELSEWHERE, "mine", ClientConfig(ca_file=ca)).certificates is not None
    assert client_credentials(ELSEWHERE, "mine", ClientConfig()).certificates is None
    monkeypatch.delenv(ENCRYPTION)
    monkeypatch.setenv(CA_FILE, ca)
    monkeypatch.setenv(SERVER_NAME, "kv.example")
    shown = client_credentials("127.0.0.1:7070", "mine", ClientConfig())
    assert shown.certificates is not None and shown.server_name == "kv.example"
    assert client_credentials(ELSEWHERE, "mine", ClientConfig(encryption="none")).certificates is None


def test_settings_that_contradict_one_another_are_refused(ca: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="by which authorities servers are verified"):
        client_credentials(ELSEWHERE, "mine", ClientConfig(encryption="tls"))
    with pytest.raises(ConfigError, match="belong together"):
        client_credentials(ELSEWHERE, "mine", ClientConfig(ca_file=ca, cert_file=ca))
    with pytest.raises(ConfigError, match="is not host:port"):
        client_credentials("10.0.0.5", "mine", ClientConfig(ca_file=ca))
