"""Authentication: what a token file may hold, which tenant a token stands for, and when a server would be open to
all."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.config import Config, ServerConfig
from kvcluster.config.ports import is_loopback
from kvcluster.core import limits
from kvcluster.core.ids import CLUSTER, Caller, Tenant
from kvcluster.errors import ConfigError, CredentialError
from kvcluster.runtime.auth import (
    DEFAULT_TENANT,
    NO_TENANT,
    Authenticator,
    Tokens,
    authenticator,
    digest,
    new_token,
    parse_tokens,
    token_line,
)

SECRET = "between the actors"
tokens = st.text(st.characters(codec="utf-8"), min_size=1)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
DIGEST = digest("a token")

# ------------------------------------------------------------------------------------------------- the file


@given(st.dictionaries(tokens, names, min_size=1), st.sampled_from(["\n", "\r\n", "\n\n", "\n# a comment\n", "  \n\t"]))
def test_what_is_written_in_a_token_file_is_read_from_it(tenants: dict[str, str], between: str) -> None:
    text = between.join(f"sha256:{digest(token)}  {name}" for token, name in tenants.items())
    assert parse_tokens(text) == Tokens({digest(token): Tenant(name) for token, name in tenants.items()}, frozenset())


@given(st.dictionaries(tokens, st.tuples(names, st.booleans()), min_size=1))
def test_the_lines_that_are_made_say_who_is_an_operator(made: dict[str, tuple[str, bool]]) -> None:
    lines = [token_line(token, name, operator=operator) for token, (name, operator) in made.items()]
    tenants, operators, *_ = parse_tokens("\n".join(lines))
    assert tenants == {digest(token): name for token, (name, _) in made.items()}
    assert operators == {digest(token) for token, (_, operator) in made.items() if operator}


@pytest.mark.parametrize("tenant", ["", "team a", "team operator", "team\n# ", "-team", "t" * 65, "tëam", "team\n"])
def test_no_line_is_made_for_a_tenant_that_would_say_more_than_a_name(tenant: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid tenant name"):
        token_line("a token", tenant)


def serving(**settings: Any) -> Config:
    return Config(server=ServerConfig(**settings))


def test_a_line_may_say_that_its_token_only_reads() -> None:
    tokens = parse_tokens(f"{token_line('mine', 'me')}\n{token_line('looks', 'me', read_only=True)}")
    assert tokens.caller(digest("looks")) == Caller(Tenant("me"), read_only=True)
    assert tokens.caller(digest("mine")) == Caller(Tenant("me"))
    with pytest.raises(ConfigError, match="line 1: the tenant is missing"):
        parse_tokens(f"sha256:{DIGEST} read-only")
    with pytest.raises(ConfigError, match="make two"):
        token_line("mine", "me", operator=True, read_only=True)


def test_grants_say_whose_kv_a_tenant_may_read_besides_its_own() -> None:
    lines = [token_line(name, name) for name in ("me", "you", "public")]
    lines += ["grant me  reads you", "grant\t*\treads  public", "grant you reads public", "grant me reads me"]
    tokens = parse_tokens("\n".join([*lines, token_line("ops", NO_TENANT, operator=True)]))
    reads = {name: tokens.caller(digest(name)).reads for name in ("me", "you", "public", "ops")}  # type: ignore[union-attr]
    assert reads == {"me": {"you", "public"}, "you": {"public"}, "public": set(), "ops": set()}
    assert tokens.reads_of(Tenant("of a certificate")) == {"public"}
    assert tokens.tenant_count == 3, "a grant makes no tenant"


@pytest.mark.parametrize(
    "line",
    [
        *("grant me", "grant me reads", "grant me reads *", "grant - reads you", "grant me reads -", "grant me you"),
        *("grant me writes you", "grants me reads you", "grant me reads you too", "grant me reads you,them", "grant"),
        *(f"sha256:{DIGEST} me read-only operator", f"sha256:{DIGEST} me readonly", f"sha256:{DIGEST} - read-only"),
    ],
)
def test_a_grant_or_a_right_that_says_more_or_less_is_told_by_line(line: str) -> None:
    with pytest.raises(ConfigError, match="line 2"):
        parse_tokens(f"{token_line('mine', 'me')}\n{line}")


def test_a_tenant_may_be_called_operator_and_is_none() -> None:
    assert parse_tokens(f"sha256:{DIGEST} operator") == Tokens({DIGEST: Tenant("operator")}, frozenset())
    assert parse_tokens(f"sha256:{DIGEST} operator\toperator").operators == {DIGEST}


@given(st.text())
def test_any_text_is_a_token_file_or_a_config_error(text: str) -> None:
    try:
        tokens = parse_tokens(text)
        assert tokens.tenants or tokens.grants or tokens.revoked, "a file without tokens would admit no client"
    except ConfigError as error:
        assert "token" in str(error)


@given(
    st.lists(st.sampled_from(["sha256:", DIGEST, DIGEST.upper(), DIGEST[1:], " ", "\t", "\n", "#", "me", "operator"]))
)
def test_what_nearly_is_a_token_file_is_one_or_a_config_error(pieces: list[str]) -> None:
    try:
        tenants, operators = parse_tokens("".join(pieces))
        assert set(tenants) == {DIGEST}
        assert operators <= {DIGEST}
    except ConfigError as error:
        assert "token" in str(error)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "contains no token"),
        ("# no tokens yet\n\n", "contains no token"),
        (f"# me\nsha256:{DIGEST}", "line 2"),
        (f"sha256:{DIGEST} me too", "line 1"),
        (f"sha256:{DIGEST} me operators", "line 1"),
        (f"sha256:{DIGEST} me Operator", "line 1"),
        (f"sha256:{DIGEST} me operator operator", "line 1"),
        (f"{DIGEST} me", "line 1"),
        (f"sha256:{DIGEST.upper()} me", "line 1"),
        (f"sha256:{DIGEST[1:]} me", "line 1"),
        (f"sha256:{DIGEST} -me", "line 1"),
        (f"sha256:{DIGEST} {'m' * 65}", "line 1"),
        ("a token me", "kvcluster token"),
        (f"sha256:{DIGEST} me\nsha256:{DIGEST} you", "line 2: this token already has a line"),
        (f"sha256:{DIGEST} me\nsha256:{DIGEST} me operator", "line 2: this token already has a line"),
    ],
)
def test_a_bad_token_file_is_told_by_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_tokens(text)


@pytest.mark.parametrize("within", ["\u2028", "\x0b", "\x0c", "\x1c", "\x85"])
def test_only_a_line_feed_ends_a_line(within: str) -> None:
    text = f"# was:{within}sha256:{digest('revoked')} me operator\nsha256:{DIGEST} me"
    assert parse_tokens(text).tenants == {DIGEST: "me"}


def test_one_tenant_may_have_several_tokens() -> None:
    text = f"sha256:{digest('old')} me\nsha256:{digest('new')} me"
    assert list(parse_tokens(text).tenants.values()) == ["me", "me"]


def test_an_operator_may_stand_for_no_tenant_and_is_not_counted_among_them() -> None:
    tokens = parse_tokens("\n".join((token_line("ops", NO_TENANT, operator=True), token_line("mine", "me"))))
    assert tokens.tenants[digest("ops")] == NO_TENANT and tokens.operators == {digest("ops")}
    assert tokens.tenant_count == 1
    known = Authenticator(tokens.tenants, SECRET, tokens.operators)
    assert known.one_tenant and known.caller("ops") == Caller(NO_TENANT, operator=True)
    assert known.worker("mine") == Caller(Tenant("me"))
    with pytest.raises(CredentialError, match="stands for no tenant"):
        known.worker("ops")


def test_nobody_else_may_stand_for_no_tenant() -> None:
    for text in (f"sha256:{DIGEST} -", f"sha256:{DIGEST} - me", f"sha256:{DIGEST} -operator"):
        with pytest.raises(ConfigError, match="line 1"):
            parse_tokens(text)
    with pytest.raises(ConfigError, match="not a valid tenant name"):
        token_line("mine", NO_TENANT)


def test_a_token_never_stands_in_an_error() -> None:
    with pytest.raises(ConfigError) as error:
        parse_tokens("plain-token-by-mistake me")
    assert "plain-token" not in str(error.value)


# ----------------------------------------------------------------------------------------------- the callers


@given(st.dictionaries(tokens, names, min_size=1), tokens)
def test_a_token_stands_for_its_tenant_and_no_other_is_known(tenants: dict[str, str], other: str) -> None:
    known = Authenticator({digest(token): Tenant(name) for token, name in tenants.items()}, SECRET)
    for token, name in tenants.items():
        assert known.caller(token) == Caller(Tenant(name))
    if other not in tenants:
        with pytest.raises(CredentialError, match="does not know this token"):
            known.caller(other)


@pytest.mark.parametrize("token", [None, ""])
def test_where_there_are_tokens_one_is_wanted(token: str | None) -> None:
    with pytest.raises(CredentialError, match="requires a token"):
        Authenticator({DIGEST: Tenant("me")}, SECRET).caller(token)


def test_only_a_token_whose_line_says_operator_is_an_operator_s() -> None:
    tenants = {digest("mine"): Tenant("me"), digest("my boss's"): Tenant("me")}
    known = Authenticator(tenants, SECRET, frozenset({digest("my boss's")}))
    assert known.caller("mine") == Caller(Tenant("me"))
    assert known.caller("my boss's") == Caller(Tenant("me"), operator=True)


def test_the_digest_of_a_token_is_no_token() -> None:
    with pytest.raises(CredentialError):
        Authenticator({DIGEST: Tenant("me")}, SECRET).caller(DIGEST)


@pytest.mark.parametrize("token", [None, "", "any"])
def test_without_a_token_file_everybody_is_the_default_tenant_and_its_operator(token: str | None) -> None:
    assert Authenticator(None, SECRET).caller(token) == Caller(DEFAULT_TENANT, operator=True)


@pytest.mark.parametrize("tenants", [None, {DIGEST: Tenant("me")}])
def test_the_secret_of_the_actors_stands_for_no_tenant(tenants: dict[str, Tenant] | None) -> None:
    known = Authenticator(tenants, SECRET)
    assert known.caller(SECRET) == Caller(CLUSTER, internal=True), "and is no operator's"
    with pytest.raises(CredentialError):
        Authenticator({DIGEST: Tenant("me")}, SECRET).caller(SECRET + "?")


def test_no_caller_is_internal_by_having_no_token() -> None:
    assert not Authenticator(None, "").caller("").internal
    assert not Authenticator(None, "").caller(None).internal


def test_new_tokens_differ_and_can_be_sent() -> None:
    made = [new_token() for _ in range(100)]
    assert len(set(made)) == 100
    assert all(token.isascii() and token.isprintable() and len(token) >= 43 for token in made)


# ------------------------------------------------------------------------- when a server would be open to all


def test_tokens_are_read_from_the_configured_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"sha256:{DIGEST}  me\n{token_line('another', 'me', operator=True)}\n", encoding="utf-8")
    known = authenticator(serving(host="0.0.0.0", token_file=str(path)), SECRET)
    assert known.caller("a token") == Caller(Tenant("me"))
    assert known.caller("another") == Caller(Tenant("me"), operator=True)
    with pytest.raises(CredentialError):
        known.caller(None)


@given(st.binary())
def test_any_bytes_are_a_token_file_or_a_config_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="token"):
        authenticator(serving(token_file=str(path)), SECRET)


@pytest.mark.parametrize("name", ["missing", ".", "missing/below", "nul\0"])
def test_a_token_file_that_cannot_be_read_is_a_config_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot read the token file"):
        authenticator(serving(token_file=str(tmp_path / name)), SECRET)


def test_a_token_file_that_has_no_end_is_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(b"#" * (limits.TOKEN_FILE_BYTES + 1))
    for endless in (path, Path("/dev/zero")):
        with pytest.raises(ConfigError, match="larger than"):
            authenticator(serving(token_file=str(endless)), SECRET)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_on_loopback_no_client_needs_a_token(host: str) -> None:
    assert is_loopback(host)
    assert authenticator(serving(host=host), SECRET).caller(None) == Caller(DEFAULT_TENANT, operator=True)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "192.168.1.1", "localhost.example", "a.host", "", "127"])
def test_elsewhere_a_server_without_tokens_refuses_to_start_unless_told_so_by_name(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match="--insecure"):
        authenticator(serving(host=host), SECRET)
    assert authenticator(serving(host=host, insecure=True), SECRET).caller(None) == Caller(
        DEFAULT_TENANT, operator=True
    )


def test_insecure_does_not_make_tokens_worthless(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"sha256:{DIGEST}  me", encoding="utf-8")
    known = authenticator(serving(token_file=str(path), insecure=True), SECRET)
    with pytest.raises(CredentialError):
        known.caller(None)


def test_a_new_token_can_be_given_on_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter(["-like-an-option", "--worse", "good-"])
    monkeypatch.setattr(secrets, "token_urlsafe", lambda nbytes: next(drawn))
    assert new_token() == "good-"
