"""What `import kvcluster` gives: names that are there whatever is installed, explained, with examples that run, and
that show themselves in a line."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import kvcluster
from kvcluster.client.client import Client
from kvcluster.core.groups import Reuse
from kvcluster.errors import CallerError, KVClusterError, SpecError
from kvcluster.testing import MemoryCluster

ROOT = Path(__file__).parents[1]
EXTRAS = ("ray", "torch", "zmq", "msgspec", "numpy", "rich", "transformers", "matplotlib", "cryptography")

# ------------------------------------------------------------------------------- whatever is installed


def without(code: str, *missing: str) -> str:
    """Returns what a process prints that lacks these packages: a name that maps to None cannot be imported."""
    hidden = f"import sys; sys.modules.update(dict.fromkeys({missing!r}))\n"
    command = [sys.executable, "-W", "error", "-c", hidden + code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


LOOK = """
import inspect, pydoc, kvcluster
from kvcluster import *
assert "LocalCluster" in pydoc.render_doc(kvcluster)
members = dict(inspect.getmembers(kvcluster))
assert all(hasattr(kvcluster, name) and name in members for name in kvcluster.__all__)
assert not hasattr(kvcluster, "no_such_name")
print(len(kvcluster.__all__), local is kvcluster.local)
"""


@pytest.mark.parametrize("missing", [*((name,) for name in EXTRAS), EXTRAS], ids="-".join)
def test_looking_at_the_names_needs_no_extra(missing: tuple[str, ...]) -> None:
    assert without(LOOK, *missing) == f"{len(kvcluster.__all__)} True"


def test_looking_at_the_names_imports_no_extra() -> None:
    assert without(f"{LOOK}\nimport sys; print(*(m for m in {EXTRAS!r} if m in sys.modules))").endswith(" True")


@pytest.mark.parametrize(
    ("use", "missing", "extra", "instead"),
    [
        (
            "kvcluster.local()",
            "ray",
            "cluster",
            ", or start a cluster within this process by kvcluster.local(ray=False)",
        ),
        ("kvcluster.EventSubscriber('tcp://127.0.0.1:5557')", "zmq", "events", ""),
        ("kvcluster.EventSubscriber('tcp://127.0.0.1:5557')", "msgspec", "events", ""),
    ],
)
def test_a_use_without_its_extra_names_what_to_install(use: str, missing: str, extra: str, instead: str) -> None:
    code = f"import kvcluster\ntry: {use}\nexcept kvcluster.KVClusterError as error: print(error)"
    needed = f"this needs {missing}, which is not installed: pip install 'kvcluster[{extra}]'"
    assert without(code, missing) == needed + instead


def test_dir_lists_the_public_names_and_nothing_else() -> None:
    assert dir(kvcluster) == sorted([*kvcluster.__all__, "__version__"])


# --------------------------------------------------------------------------------- explained, by examples


SPEC = kvcluster.KVSpec.uniform(
    model="m", weights="sha256:1", num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32", block_tokens=16
)
SHAPE = (4, 2, 2, 16, 2, 16)
TOKENS = list(range(64))
_EXAMPLE = re.compile(r"(?:^ {4,}[^\n]*\n(?:\n(?= {4}))?)+", re.MULTILINE)


def explained(name: str) -> str:
    """The docstring of a public name; that of a constant is its type's."""
    named = getattr(kvcluster, name)
    return inspect.getdoc(type(named) if isinstance(named, Reuse) else named) or ""


def examples(name: str) -> list[str]:
    return [inspect.cleandoc("\n" + code) for code in _EXAMPLE.findall(explained(name) + "\n")]


@contextmanager
def surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names that examples use, over a cluster within this process."""
    config = {"client": {"resident_bytes": "16MiB"}}
    with MemoryCluster(ram_bytes="4MiB", config=config) as cluster, ExitStack() as stack:

        def connect(address: str, spec: kvcluster.KVSpec, **settings: Any) -> Client:
            assert (address, spec) == ("127.0.0.1:7070", SPEC)
            return cluster.client(spec)

        real = kvcluster.local

        def local(**settings: Any) -> kvcluster.LocalCluster:
            return real(**{**settings, "ray": False})  # on Ray: tests/actors

        monkeypatch.setattr(kvcluster, "connect", connect)
        monkeypatch.setattr(kvcluster, "local", local)
        client = cluster.client(SPEC)
        client.store(TOKENS, torch.randn(SHAPE))
        client.flush()
        ticket = stack.enter_context(client.prepare_load(client.hashes(TOKENS)))
        yield {
            "kvcluster": kvcluster,
            "spec": SPEC,
            "client": client,
            "token_ids": TOKENS,
            "kv": torch.randn(SHAPE),
            "out": torch.empty(SHAPE),
            "into": torch.empty(SHAPE),
            "ticket": ticket,
            "digest_of_image": b"sha256",
            **{name: torch.randn(64, 2, 16) for name in ("k", "v", "q")},
            "query": torch.randn(1, 2, 16),
            "attend": lambda query, pages: pages,
            "recompute": lambda query: query,
        }


@pytest.mark.parametrize("name", sorted({*kvcluster.__all__} - {"errors"}))
def test_a_public_name_is_explained_by_an_example_that_runs(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    code = examples(name)
    assert code, f"{name} has no example"
    with surroundings(monkeypatch) as names:
        for example in code:
            exec(compile(example, name, "exec"), names)


PUBLIC = [named for name in kvcluster.__all__ if not isinstance(named := getattr(kvcluster, name), (ModuleType, Reuse))]


def test_every_public_method_is_explained() -> None:
    for named in PUBLIC:
        for name, method in vars(named).items() if isinstance(named, type) else ():
            if not name.startswith("_") and (callable(method) or isinstance(method, (property, classmethod))):
                assert inspect.getdoc(method), f"{named.__name__}.{name}"


# ------------------------------------------------------------------------------- shown in a line


def test_what_a_user_holds_shows_itself_in_a_short_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with surroundings(monkeypatch) as names:
        client, ticket = names["client"], names["ticket"]
        transfer = client.begin_load(ticket, names["out"])
        loaded = transfer.result()
        many = dict.fromkeys(range(1_000), kvcluster.Miss(kvcluster.MissReason.EVICTED))
        sequence = client.sequence(TOKENS)
        shown = {
            client: "<Client of m>",
            ticket: "<Ticket for 4 blocks>",
            transfer: f"<Transfer {loaded!r}>",
            sequence: "<Sequence of 64 tokens>",
            kvcluster.SequenceBatch([sequence]): "<SequenceBatch of 1 sequences>",
            kvcluster.Dense(names["kv"]): "Dense([4, 2, 2, 16, 2, 16] float32)",
            kvcluster.Paged([names["k"]] * 2, range(64)): "Paged(2 layers of [64, 2, 16] float32, 64 block ids)",
            kvcluster.Paged([(names["k"], names["v"])], [0]): (
                "Paged(1 layers of [64, 2, 16] float32, [64, 2, 16] float32, 1 block ids)"
            ),
            kvcluster.Buffers([b"page"] * 3): "Buffers(3 pages)",
        }
        assert {repr(value): repr(value) for value in shown} == {text: text for text in shown.values()}
        prompt = kvcluster.Prompt(TOKENS, salt=b"secret")
        assert repr(prompt) == "Prompt(64 tokens, with salt)", "and not the salt itself"
        failed = repr(kvcluster.Loaded(0, 0, many[0], many))
        assert "failed={1000 blocks}" in failed and len(failed) < 200
        client.close()
        assert repr(client) == "<Client of m, closed>"


def test_a_spec_shows_its_layers_as_ranges_that_can_be_evaluated() -> None:
    planes = (kvcluster.Plane("k", 8, 128, "bfloat16"),)
    for layers in [(0,), (3,), (0, 1), tuple(range(80)), tuple(range(1, 80, 2)), (0, 1, 5)]:
        group = kvcluster.Group(layers, planes)
        assert len(repr(group)) < 200
        assert eval(repr(group), {"Group": kvcluster.Group, "Plane": kvcluster.Plane, "Reuse": Reuse}) == group


# ----------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "uint8"])
def test_a_dtype_may_be_given_by_name_or_as_torch_has_it(name: str) -> None:
    for dtype in (name, f"torch.{name}", getattr(torch, name)):
        settings = {"model": "m", "weights": "sha256:1", "num_layers": 1, "num_kv_heads": 1, "head_dim": 8}
        spec = kvcluster.KVSpec.uniform(**settings, dtype=dtype)
        assert {plane.dtype for plane in spec.groups[0].planes} == {name}
        assert kvcluster.Plane("k", 1, 8, dtype) == kvcluster.Plane("k", 1, 8, name)


def test_a_dtype_may_be_given_as_numpy_has_it() -> None:
    import numpy as np

    for dtype in (np.float16, np.dtype("float16"), np.dtype(np.float16)):
        assert kvcluster.Plane("k", 1, 8, dtype).dtype == "float16"  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["half", float, None, torch.complex64, 2])
def test_a_dtype_that_no_plane_has_is_refused_with_those_that_it_may_have(dtype: Any) -> None:
    with pytest.raises(SpecError, match="is not one of float32, bfloat16, float16"):
        kvcluster.Plane("k", 1, 8, dtype)


def test_the_errors_are_one_tree() -> None:
    assert issubclass(CallerError, KVClusterError) and kvcluster.errors.KVClusterError is KVClusterError
