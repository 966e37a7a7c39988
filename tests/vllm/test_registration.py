"""An engine's registration: the namespace of its KV, and how it gets a client without waiting for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig

from kvcluster.client.client import Client
from kvcluster.core.messages import EngineInfo, Engines, GetEngines, Registered, SetWeights
from kvcluster.core.spec import KVSpec, differing_fields
from kvcluster.engines.vllm import compat, registration, weights
from kvcluster.engines.vllm.registration import Adapters, Registration
from kvcluster.errors import CallerError, LimitError, Unreachable
from kvcluster.testing import MemoryCluster
from kvcluster.transport.base import Deadline
from tests.client.build import BOUND_S
from tests.client.conftest import Start
from tests.vllm.build import GEMMA, LLAMA, engine_config, kv_config, layout_of, model_folder, settings_of


def spec_of(model: Path, extra: dict[str, Any] | None = None, **arguments: Any) -> KVSpec:
    """What an engine over this checkpoint caches under."""
    config = engine_config(model, extra, **arguments)
    settings = settings_of(config)
    found = settings.weights or weights.fingerprint(str(model), model.parent / "cache")
    return registration.spec_of(config, layout_of(config), settings, found)


def checkpoint(folder: Path, content: dict[str, Any] = LLAMA, weight: bytes = b"1" * 100) -> Path:
    made = model_folder(folder, content)
    (made / "pytorch_model.bin").write_bytes(weight)
    return made


READ = {"weights": ""}
"""The fingerprint is to be found out."""


# -------------------------------------------------------------------------------------------------- who is equal


def test_the_same_checkpoint_at_another_path_is_the_same(tmp_path: Path) -> None:
    one, other = (spec_of(checkpoint(tmp_path / host / "tiny"), READ) for host in ("one", "other"))
    assert one == other
    assert one.model == "tiny"
    assert one.weights.startswith("sha256:")


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_model_len": 128},
        {"max_num_batched_tokens": 32, "max_num_seqs": 2},
        {"enable_prefix_caching": False},
        {"prefix_caching_hash_algo": "sha256_cbor"},
        {"tensor_parallel_size": 2},
        {"seed": 7},
        {"enforce_eager": False},
    ],
)
def test_how_an_engine_runs_does_not_matter(tmp_path: Path, arguments: dict[str, Any]) -> None:
    model = checkpoint(tmp_path / "tiny")
    assert spec_of(model, **arguments) == spec_of(model)


def test_a_name_in_the_settings_stands_for_the_folders(tmp_path: Path) -> None:
    one, other = checkpoint(tmp_path / "one"), checkpoint(tmp_path / "other")
    assert differing_fields(spec_of(one, READ), spec_of(other, READ)) == ("model",)
    named = READ | {"model": "mine"}
    assert spec_of(one, named) == spec_of(other, named)


# --------------------------------------------------------------------------------------------------- who is not


def test_other_weights_are_others(tmp_path: Path) -> None:
    one = spec_of(checkpoint(tmp_path / "one" / "tiny"), READ)
    other = spec_of(checkpoint(tmp_path / "other" / "tiny", weight=b"1" * 99 + b"2"), READ)
    assert differing_fields(one, other) == ("weights",)


def test_another_number_format_is_another(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "tiny")
    assert "dtype" in differing_fields(spec_of(model), spec_of(model, dtype="bfloat16"))


def test_another_release_of_the_engine_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoint(tmp_path / "tiny")
    one = spec_of(model)
    monkeypatch.setattr(compat.vllm, "__version__", "9.9.1")
    assert differing_fields(one, spec_of(model)) == ("extra.engine",)
    assert ("engine", "vllm-9.9") in spec_of(model).extra


def test_another_block_size_is_another(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "tiny")
    assert differing_fields(spec_of(model), spec_of(model, block_size=8)) == ("block_tokens",)


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0}}, "rope"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}}, "rope"),
        ({"rms_norm_eps": 1e-3}, "extra.config"),
        ({"hidden_act": "gelu"}, "extra.config"),
    ],
)
def test_settings_of_the_model_that_were_overridden_make_another(
    tmp_path: Path, overrides: dict[str, Any], field: str
) -> None:
    model = checkpoint(tmp_path / "tiny")
    assert differing_fields(spec_of(model), spec_of(model, hf_overrides=overrides)) == (field,)


def test_another_window_is_another(tmp_path: Path) -> None:
    one = spec_of(checkpoint(tmp_path / "one" / "tiny", GEMMA))
    other = spec_of(checkpoint(tmp_path / "other" / "tiny", GEMMA | {"sliding_window": 8}))
    assert "layout" in differing_fields(one, other)


def test_weights_that_are_not_pinned_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="does not pin the weights"):
        spec_of(checkpoint(tmp_path / "tiny"), {"weights": "main"})


# ---------------------------------------------------------------------------------------------------- registration


class Door:
    """A cluster that lets members in, or says why not."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self._cluster = cluster
        self.closed: BaseException | None = None
        self.knocks = threading.Semaphore(0)
        self.let_in: list[Client] = []

    def connect(self, address: str, spec: KVSpec, *, part: Any, **how: Any) -> Client:
        self.knocks.release()
        if self.closed is not None:
            raise self.closed
        self.let_in.append(self._cluster.client(spec, part=part))
        return self.let_in[-1]

    def wait_knock(self) -> None:
        assert self.knocks.acquire(timeout=BOUND_S)


class Bench:
    """Memberships of one engine over a door, and what they log."""

    def __init__(self, cluster: MemoryCluster, model: Path, stack: ExitStack) -> None:
        self.cluster = cluster
        self.door = Door(cluster)
        self.model = model
        self.logged: list[str] = []
        self._stack = stack

    def member(
        self, extra: dict[str, Any] | None = None, *, whole: bool = True, start: bool = True, **arguments: Any
    ) -> Registration:
        config = engine_config(self.model, extra, **arguments)
        layout = compat.layout(config, kv_config(config))
        made = Registration(config, layout, settings_of(config), whole=whole, log=self.logged.append)
        if start:
            made.start()
            self._stack.callback(made.close)
        return made

    def until(self, holds: Callable[[], object]) -> None:
        self.cluster.wait_until(lambda: bool(holds()), BOUND_S)


@pytest.fixture
def bench(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with ExitStack() as stack:
        bench = Bench(start(shards=1, ram_bytes="1MiB"), checkpoint(tmp_path / "tiny"), stack)
        monkeypatch.setattr(registration, "connect", bench.door.connect)
        monkeypatch.setattr(registration, "_PAUSE_S", 0.001)
        monkeypatch.setattr(registration, "_REGISTER_S", 0.02)
        monkeypatch.setattr(weights, "_user_cache", lambda: tmp_path / "cache")
        yield bench


def test_an_engine_starts_without_a_cluster_and_joins_when_it_comes(bench: Bench) -> None:
    bench.door.closed = Unreachable("no server listens at cluster:1")
    member = bench.member()
    for _ in range(3):
        bench.door.wait_knock()
    assert member.client is None and member.spec is None
    assert member.why == "no server listens at cluster:1"
    assert bench.logged == ["computing everything until the cluster answers: no server listens at cluster:1"], "once"
    bench.door.closed = None
    bench.until(lambda: member.client)
    assert member.why == ""
    assert member.spec is not None and member.spec.weights == "sha256:1"
    assert bench.logged[-1] == "caching tiny under weights sha256:1 at cluster:1"


def test_weights_that_are_not_given_are_read_beside_the_engine(bench: Bench) -> None:
    member = bench.member(READ)
    bench.until(lambda: member.client)
    assert member.spec is not None
    assert member.spec.weights == weights.fingerprint(str(bench.model), bench.model.parent / "elsewhere")


def test_a_scheduler_speaks_for_all_heads_and_a_worker_for_its_own(bench: Bench) -> None:
    whole = bench.member(tensor_parallel_size=2)
    part = bench.member(whole=False, tensor_parallel_size=2)
    bench.until(lambda: whole.client and part.client)
    assert whole.client is not None and part.client is not None
    assert [one and one.heads for one in whole.client.parts] == [2]
    assert [one and one.heads for one in part.client.parts] == [1]
    assert whole.spec == part.spec


def test_who_withdraws_leaves_at_once_and_is_alone_from_then_on(bench: Bench) -> None:
    member, other = bench.member(), bench.member()
    bench.until(lambda: member.client and other.client)
    for one in (member, other):
        bench.door.closed = Unreachable("busy")
        one.withdraw(ready=True)
        assert one.client is None
    bench.door.closed = None
    bench.until(lambda: member.client and other.client)
    assert member.spec is not None and other.spec is not None
    names = {member.spec.weights, other.spec.weights, "sha256:1"}
    assert len(names) == 3, "not even with another that has withdrawn"


# ------------------------------------------------------------------------------------------------- registration


class Desk:
    """An operator's view of the engines of one tenant."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._client = bench.cluster.client(spec_of(bench.model))

    def engines(self) -> list[EngineInfo]:
        return [info for info, _ in self._client._control.request(Engines, GetEngines(), _soon()).known]

    def shown(self, **fields: object) -> bool:
        """Is there one engine, and is it like this?"""
        known = self.engines()
        return len(known) == 1 and all(getattr(known[0], name) == value for name, value in fields.items())

    def set_weights(self, weights: str) -> int:
        message = SetWeights("tiny", weights)
        return len(self._client._control.request(Engines, message, _soon()).known)


def _soon() -> Deadline:
    return Deadline.after_ms(BOUND_S * 1e3)


def test_an_engine_registers_what_it_is_once_and_not_for_each_rank(bench: Bench) -> None:
    member, worker = bench.member(), bench.member(whole=False)
    bench.until(lambda: member.client and worker.client)
    desk = Desk(bench)
    bench.until(lambda: desk.shown(model="tiny", weights="sha256:1", private=False, withdrawn=0))
    [info] = desk.engines()
    facts = dict(info.facts)
    assert facts["engine"] == f"vllm {compat.vllm.__version__}"
    assert facts["hash"] == "sha256 over token ids, not seeded"
    assert (facts["own hash"], facts["block"], facts["dtype"], facts["ranks"]) == ("sha256", "4 tokens", "float32", "1")
    assert facts["groups"] == "2 layers"
    assert info.name.endswith(f":{os.getpid()}")


def test_who_has_withdrawn_shares_again_under_the_weights_that_an_operator_names(bench: Bench) -> None:
    member, desk = bench.member(), Desk(bench)
    bench.until(lambda: member.client)
    member.withdraw(ready=True)
    bench.until(lambda: desk.shown(private=True, withdrawn=1))
    assert desk.set_weights("sha256:new") == 1
    bench.until(lambda: desk.shown(weights="sha256:new", private=False))
    assert member.spec is not None and member.spec.weights == "sha256:new"
    assert bench.logged[-2] == "an operator has named the weights sha256:new; caching under them from now on"
    assert desk.set_weights("sha256:newer") == 0, "it is private no more"


def test_a_word_for_an_earlier_withdrawal_is_not_taken(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    member, desk = bench.member(), Desk(bench)
    bench.until(lambda: member.client)
    member.withdraw(ready=True)
    bench.until(lambda: desk.shown(private=True, withdrawn=1))
    assert desk.set_weights("sha256:new") == 1
    register = Client.register

    def late(client: Client, info: EngineInfo, **more: Any) -> Registered:
        told = register(client, info, **more)
        if told.weights:
            member.withdraw(ready=True)  # before it is heard
        return told

    monkeypatch.setattr(Client, "register", late)
    bench.until(lambda: desk.shown(private=True, withdrawn=2) or member._withdrawn > 2 or not member._private)
    monkeypatch.undo()
    assert member._private and member._withdrawn == 2
    bench.until(lambda: member.client)
    assert member.spec is not None and member.spec.weights.startswith("private:")


def test_who_still_holds_kv_of_the_weights_before_is_not_given_a_name(bench: Bench) -> None:
    member, desk = bench.member(), Desk(bench)
    bench.until(lambda: member.client)
    member.withdraw(ready=False)
    bench.until(lambda: desk.shown(private=True, ready=False))
    assert desk.set_weights("sha256:new") == 0
    member.withdraw(ready=True)
    bench.until(lambda: desk.shown(withdrawn=2, ready=True))
    assert desk.set_weights("sha256:new") == 1


def test_a_cluster_that_lists_no_engines_serves_them_all_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(client: Client, info: EngineInfo, **more: Any) -> Registered:
        raise LimitError("the limit of registered engines is reached")

    asked = threading.Event()
    monkeypatch.setattr(Client, "register", lambda *given, **more: (asked.set(), refuse(*given, **more)))
    member = bench.member()
    assert asked.wait(BOUND_S)
    assert member.client is not None and member._thread.is_alive()


# ---------------------------------------------------------------------------------------------------- other weights


def test_the_client_of_the_weights_before_is_closed(bench: Bench) -> None:
    member = bench.member()
    bench.until(lambda: member.client)
    left = member.client
    assert left is not None
    member.use("sha256:2")
    bench.until(lambda: member.client)
    assert member.spec is not None and member.spec.weights == "sha256:2"
    assert left._closed
    member.use("sha256:2")
    assert member.client is not None, "it is that already"


def test_nor_is_one_forgotten_that_was_left_twice_in_a_moment(bench: Bench) -> None:
    member = bench.member()
    bench.until(lambda: member.client)
    first = member.client
    assert first is not None
    with member._changed:  # so that its thread sees both at once
        member.use("sha256:2")
        member.use("sha256:3")
    bench.until(lambda: member.client)
    assert member.spec is not None and member.spec.weights == "sha256:3"
    assert first._closed


def test_a_reset_that_comes_before_the_weights_were_read_stands(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    read = threading.Event()

    def fingerprint(path: str) -> str:
        assert read.wait(BOUND_S)
        return "sha256:read"

    monkeypatch.setattr(weights, "fingerprint", fingerprint)
    member = bench.member(READ)
    assert member.why == "the weights are being read"
    member.use("sha256:9")
    read.set()
    bench.until(lambda: member.client)
    assert member.spec is not None and member.spec.weights == "sha256:9"


def test_who_moved_while_it_was_joining_does_not_stay_under_what_it_was(bench: Bench) -> None:
    member = bench.member(start=False)
    connect = bench.door.connect

    def slow(*arguments: Any, **more: Any) -> Client:
        client = connect(*arguments, **more)
        if len(bench.door.let_in) == 1:
            member.use("sha256:2")
        return client

    registration.connect = slow  # type: ignore[assignment]
    member.start()
    bench.until(lambda: member.client)
    assert member.spec is not None and member.spec.weights == "sha256:2"
    assert bench.door.let_in[0]._closed
    member.close()


@pytest.mark.parametrize("there", [True, False])
def test_closing_ends_its_thread_and_its_client(bench: Bench, there: bool) -> None:
    if not there:
        bench.door.closed = Unreachable("no answer")
    member = bench.member()
    bench.door.wait_knock()
    if there:
        bench.until(lambda: member.client)
    member.close()
    member._thread.join(BOUND_S)
    assert not member._thread.is_alive()
    assert member.client is None
    assert all(client._closed for client in bench.door.let_in)


def fails(bench: Bench, why: str, extra: dict[str, Any] | None = None, **arguments: Any) -> None:
    """Such an engine goes without, and says why."""
    member = bench.member(extra, **arguments)
    member._thread.join(BOUND_S)
    assert not member._thread.is_alive()
    assert member.client is None
    assert why in member.why
    assert bench.logged == [f"neither loads nor stores: {member.why}"]


def test_a_token_that_cannot_be_read_is_told(bench: Bench, tmp_path: Path) -> None:
    fails(bench, "cannot read token_file", {"token_file": str(tmp_path / "none")})


def test_weights_that_are_made_up_are_told(bench: Bench) -> None:
    fails(bench, "load_format is dummy", READ, load_format="dummy")


def test_a_cluster_that_refuses_for_good_is_told(bench: Bench) -> None:
    bench.door.closed = CallerError("this model is not wanted")
    fails(bench, "this model is not wanted")


def test_an_unexpected_error_is_logged(bench: Bench) -> None:
    bench.door.closed = ZeroDivisionError("oh")
    fails(bench, "ZeroDivisionError: oh")


# ------------------------------------------------------------------------------------------------------ adapters


class Reader:
    """Reads adapters as fast as a test lets it."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.read: list[str] = []
        self.logged: list[str] = []
        self.told = threading.Semaphore(0)
        self.error: BaseException | None = None
        self.adapters = Adapters(self.log, self.fingerprint)

    def log(self, text: str) -> None:
        self.logged.append(text)
        self.told.release()

    def fingerprint(self, path: str) -> str:
        assert self.go.wait(BOUND_S)
        self.read.append(path)
        if self.error is not None:
            raise self.error
        return f"sha256:{path}"


def test_no_adapter_is_known_from_the_first(bench: Bench) -> None:
    assert Reader().adapters.get(0, "") == ""


def test_an_adapter_is_read_beside_the_engine_and_known_later(bench: Bench) -> None:
    reader = Reader()
    assert reader.adapters.get(1, "a") is None
    assert reader.adapters.get(1, "a") is None
    reader.go.set()
    bench.until(lambda: reader.adapters.get(1, "a"))
    assert reader.adapters.get(1, "a") == "sha256:a"
    assert reader.read == ["a"], "once"


def test_an_adapter_is_read_once_there_is_room_for_a_thread(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    reader = Reader()
    reader.go.set()
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        assert reader.adapters.get(1, "a") is None
    assert "no room for another thread" in reader.logged[0]
    bench.until(lambda: reader.adapters.get(1, "a"))
    assert reader.adapters.get(1, "a") == "sha256:a"


def test_a_number_with_several_paths_has_no_hash_any_more(bench: Bench) -> None:
    """The engine may have evicted what it loaded first, and loads again from the path of the next request."""
    reader = Reader()
    reader.go.set()
    for number, path in ((1, "a"), (2, "b")):
        reader.adapters.get(number, path)
        bench.until(lambda number=number, path=path: reader.adapters.get(number, path))
    assert reader.adapters.get(1, "b") is None
    assert reader.adapters.get(1, "a") is None
    assert reader.adapters.get(2, "b") == "sha256:b"
    assert reader.logged == ["neither loads nor stores for adapter 1: requests give several paths, also b"]
    assert sorted(reader.read) == ["a", "b"], "once each"


@pytest.mark.parametrize(
    ("error", "why"),
    [(CallerError("a holds no files"), "a holds no files"), (OSError("no locks"), "OSError: no locks")],
)
def test_an_adapter_that_cannot_be_read_goes_without_and_says_why(error: BaseException, why: str) -> None:
    reader = Reader()
    reader.error = error
    reader.go.set()
    assert reader.adapters.get(1, "a") is None
    assert reader.told.acquire(timeout=BOUND_S)
    assert reader.logged == [f"neither loads nor stores for the adapter a: {why}"]
    assert reader.adapters.get(1, "a") is None


def test_a_config_is_never_changed_by_what_is_read_of_it(tmp_path: Path) -> None:
    config: VllmConfig = engine_config(checkpoint(tmp_path / "tiny"))
    before = config.model_config.hf_text_config.to_dict()
    registration.spec_of(config, layout_of(config), settings_of(config), "sha256:1")
    assert config.model_config.hf_text_config.to_dict() == before
