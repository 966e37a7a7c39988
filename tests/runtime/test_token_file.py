"""A token file that changes under a running server: who is admitted from when on, and what an unusable file does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvcluster.config import Config, ServerConfig
from kvcluster.core.ids import CLUSTER, Caller, Tenant
from kvcluster.errors import ConfigError, CredentialError
from kvcluster.runtime.auth import (
    Authenticator,
    TokenFile,
    authenticator,
    digest,
    read_token_file,
    token_line,
)
from kvcluster.watched_files import LOOK_S

SECRET = "between the actors"


class Watched:
    """A token file, and an authenticator that reads it by a clock of its own."""

    def __init__(
        self, path: Path, tokens: dict[str, str], *, one_tenant: bool = False, must_exist: bool = True
    ) -> None:
        self.path = path
        self.now = 0.0
        self._written = 0
        if tokens:
            self.write(tokens)
        file = TokenFile(str(path), one_tenant=one_tenant, must_exist=must_exist, clock=lambda: self.now)
        self.auth = Authenticator(None, SECRET, file=file)

    def write(self, tokens: dict[str, str]) -> None:
        self.write_text("\n".join(token_line(token, tenant) for token, tenant in tokens.items()))

    def write_text(self, text: str) -> None:
        self.path.write_text(text)
        self.path.chmod(0o600)
        self._written += 1
        os.utime(self.path, ns=(self._written, self._written))  # however coarse the clock of the file system

    def later(self) -> None:
        self.now += LOOK_S

    def tenant(self, token: str) -> Tenant:
        return self.auth.caller(token).tenant


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens"


def test_a_token_that_is_added_is_admitted_and_one_that_is_removed_is_not(path: Path) -> None:
    watched = Watched(path, {"old": "me"})
    assert watched.tenant("old") == "me"
    watched.write({"new": "me"})
    watched.later()
    assert watched.tenant("new") == "me"
    with pytest.raises(CredentialError, match="does not know this token"):
        watched.tenant("old")


def test_the_file_is_looked_at_once_in_a_while_and_not_for_each_call(path: Path) -> None:
    watched = Watched(path, {"old": "me"})
    watched.write({"new": "me"})
    assert watched.tenant("old") == "me"


@pytest.mark.parametrize("text", ["", "nonsense", "sha256:1234 me", "# no token"])
def test_the_last_good_file_holds_while_the_present_one_is_bad(
    path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(path, {"old": "me"})
    watched.write_text(text)
    for _ in range(3):
        watched.later()
        assert watched.tenant("old") == "me"
    assert len(caplog.records) == 1 and "stay valid" in caplog.text, "it is told once"
    watched.write({"new": "me"})
    watched.later()
    assert watched.tenant("new") == "me"


def test_the_last_good_file_holds_when_it_is_removed(path: Path) -> None:
    watched = Watched(path, {"old": "me"})
    path.unlink()
    watched.later()
    assert watched.tenant("old") == "me"


def test_a_server_that_restarts_without_its_file_admits_the_cluster_and_nobody_else_until_it_is_there(
    path: Path,
) -> None:
    watched = Watched(path, {}, must_exist=False)
    assert watched.auth.caller(SECRET) == Caller(CLUSTER, internal=True)
    assert not watched.auth.one_tenant, "several may come: nothing is shared yet"
    with pytest.raises(CredentialError, match="until its token file can be used: cannot read the token file"):
        watched.tenant("mine")
    watched.write({"mine": "me"})
    watched.later()
    assert watched.tenant("mine") == "me"


def test_a_second_tenant_is_not_admitted_where_memory_is_shared_with_the_first(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(path, {"mine": "me"}, one_tenant=True)
    watched.write({"mine": "me", "yours": "you"})
    watched.later()
    with pytest.raises(CredentialError):
        watched.tenant("yours")
    assert watched.tenant("mine") == "me" and "leave shm out of server.transports" in caplog.text
    assert "now names several tenants" in watched.auth.trouble(), "the status and a metric report it, too"
    watched.write({"other": "me"})
    watched.later()
    assert watched.tenant("other") == "me", "another token of the same tenant is"
    assert not watched.auth.trouble()


def test_where_there_were_several_tenants_others_are_admitted(path: Path) -> None:
    watched = Watched(path, {"mine": "me", "yours": "you"}, one_tenant=True)
    watched.write({"mine": "me"})
    watched.later()
    assert watched.tenant("mine") == "me"
    watched.write({"mine": "me", "theirs": "them"})
    watched.later()
    assert watched.tenant("theirs") == "them"


@pytest.mark.parametrize(
    ("mode", "good"), [(0o600, True), (0o644, True), (0o660, False), (0o602, False), (0o666, False)]
)
def test_a_file_that_others_may_write_is_refused(path: Path, mode: int, good: bool) -> None:
    path.write_text(token_line("mine", "me"))
    path.chmod(mode)
    if good:
        assert read_token_file(str(path)).tenants == {digest("mine"): "me"}
    else:
        with pytest.raises(ConfigError, match="can be written by other users"):
            read_token_file(str(path))


def test_a_file_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(token_line("mine", "me"))
    owner = os.stat(path).st_uid
    if owner == 0:
        assert read_token_file(str(path)).tenants, "root may do that in any case"
        os.chown(path, 12_345, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 54_321)
    with pytest.raises(ConfigError, match="belongs to user"):
        read_token_file(str(path))


def test_the_first_start_of_a_server_needs_its_file(path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the token file"):
        authenticator(Config(server=ServerConfig(token_file=str(path))), SECRET)
    assert (
        authenticator(Config(server=ServerConfig(token_file=str(path))), SECRET, restarted=True).caller(SECRET).internal
    )
