"""An argument of another type is refused by its name, for every argument of a spec, a prompt and a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcluster
from kvcluster.config import ClientConfig, Config, client_config, load
from kvcluster.core.groups import PREFIX, Reuse
from kvcluster.errors import KVClusterError

PLANE = kvcluster.Plane("k", 1, 8, "float32")
GROUP = kvcluster.Group((0,), (PLANE,))


class Stranger:
    """What no argument is."""


anything: st.SearchStrategy[Any] = st.deferred(
    lambda: (
        st.sampled_from([None, True, Stranger(), Stranger, len, PLANE, GROUP, PREFIX, Ellipsis, {1}])
        | st.integers(-2, 70_000)
        | st.sampled_from([2**40, -(2**70), 2**80, 1.5, float("nan"), 1j, "x", "", "\ud800", b"x", bytearray(3)])
        | st.sampled_from([range(3), numpy.arange(4), numpy.float32(1), numpy.zeros((2, 2))])
        | st.lists(anything, max_size=2)
        | st.lists(anything, max_size=2).map(tuple)
        | st.dictionaries(st.sampled_from(["a", "b", 1, None, b"c"]), anything, max_size=2)
    )
)


def is_text(value: object) -> bool:
    return isinstance(value, str)


def is_number(value: object) -> bool:
    return type(value) is int


def is_pairs(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and all(map(is_text, pair)) for pair in value
    )


def is_texts(value: object) -> bool:
    return value is None or (isinstance(value, Mapping) and all(map(is_text, [*value, *value.values()])))


def is_all(kind: type) -> Callable[[object], bool]:
    def holds(value: Any) -> bool:
        if isinstance(value, range):
            return kind is int
        listed = isinstance(value, (list, tuple, set))
        return listed and all(type(each) is kind for each in value)

    return holds


def is_keys(value: object) -> bool:
    return value is None or isinstance(value, Mapping)


SPEC = {"model": "m", "weights": "sha256:0", "block_tokens": 4, "adapter": "", "rope": ""}
UNIFORM = SPEC | {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "dtype": "float32", "extra": None}
SPEC_TYPES = {"model": is_text, "weights": is_text, "block_tokens": is_number, "adapter": is_text, "rope": is_text}

Case = tuple[Callable[..., object], Mapping[str, Any], Mapping[str, Callable[[Any], bool]]]
"""What is made, arguments that are right, and for each whether a value may be right."""

CASES: dict[str, Case] = {
    "KVSpec": (
        kvcluster.KVSpec,
        SPEC | {"groups": (GROUP,), "extra": (), "private": False},
        SPEC_TYPES
        | {"groups": is_all(kvcluster.Group), "extra": is_pairs, "private": lambda value: type(value) is bool},
    ),
    "KVSpec.uniform": (
        kvcluster.KVSpec.uniform,
        UNIFORM,
        SPEC_TYPES
        | dict.fromkeys(["num_layers", "num_kv_heads", "head_dim"], is_number)
        | {"dtype": lambda value: is_text(value) or isinstance(value, type | numpy.generic), "extra": is_texts},
    ),
    "Plane": (
        kvcluster.Plane,
        {"name": "k", "heads": 1, "dim": 8, "dtype": "opaque", "packing": ""},
        {"name": is_text, "heads": is_number, "dim": is_number, "dtype": is_text, "packing": is_text},
    ),
    "Plane.opaque": (
        kvcluster.Plane.opaque,
        {"name": "k", "nbytes": 8, "heads": 1, "packing": ""},
        {"name": is_text, "nbytes": is_number, "heads": is_number, "packing": is_text},
    ),
    "Group": (
        kvcluster.Group,
        {"layers": (0,), "planes": (PLANE,), "reuse": PREFIX},
        {"layers": is_all(int), "planes": is_all(kvcluster.Plane), "reuse": lambda value: isinstance(value, Reuse)},
    ),
    "Reuse": (Reuse, {"kind": "window", "tokens": 4}, {"kind": is_text, "tokens": is_number}),
    "window": (kvcluster.window, {"tokens": 4}, {"tokens": is_number}),
    "WindowPolicy": (
        kvcluster.WindowPolicy,
        {"tail_tokens": 4, "migration_tokens": 4, "sink_tokens": 4, "codec": "raw"},
        dict.fromkeys(["tail_tokens", "migration_tokens", "sink_tokens"], is_number) | {"codec": is_text},
    ),
    "Prompt": (
        kvcluster.Prompt,
        {"token_ids": [1], "salt": b"", "adapter": None, "extra_keys": None},
        {
            "salt": lambda value: isinstance(value, bytes),
            "adapter": lambda value: value is None or is_text(value),
            "extra_keys": is_keys,
        },
    ),
    "ClientConfig": (
        lambda **given: client_config(ClientConfig(**given)),
        {each.name: each.default for each in fields(ClientConfig)},
        {
            each.name: (
                is_all(str)
                if each.name == "transports"
                else is_text
                if each.name == "accept"
                else (lambda value: is_number(value) or is_text(value))
            )
            for each in fields(ClientConfig)
        },
    ),
    "config": (
        lambda **given: load(None, given),
        dict.fromkeys([each.name for each in fields(Config)]),
        {
            each.name: (
                is_number
                if type(each.default) is int
                else is_text
                if type(each.default) is str
                else lambda value: isinstance(value, Mapping)
            )
            for each in fields(Config)
        },
    ),
}
ARGUMENTS = [(name, argument) for name, (_, right, _) in CASES.items() for argument in right]


def test_every_argument_is_tried() -> None:
    for name, (make, right, _) in CASES.items():
        if not name.startswith(("ClientConfig", "config")):
            assert set(inspect.signature(make).parameters) == set(right), name


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
@settings(max_examples=40)
@given(value=anything)
def test_an_argument_of_another_type_is_refused_by_its_name(name: str, argument: str, value: Any) -> None:
    make, right, of_type = CASES[name]
    may_be_right = of_type.get(argument, lambda value: True)(value)
    try:
        make(**({} if name == "config" else dict(right)) | {argument: value})
    except KVClusterError as error:
        assert may_be_right or NAMED.get(argument, argument) in str(error)
    else:
        assert may_be_right, f"{value!r} was taken"


NAMED = {"token_ids": "token ids", "nbytes": "dim"}
"""How an error calls an argument that it does not name as it is spelt."""


@pytest.mark.parametrize("value", [5, "x", [("server", {})], b"", Stranger()])
def test_a_configuration_that_is_no_mapping_is_refused(value: Any) -> None:
    for make in (partial(load, None), lambda config: kvcluster.local(ray=False, config=config)):
        with pytest.raises(KVClusterError, match="config"):
            make(value)


@pytest.mark.parametrize("value", [5, 1.5, [], {}, Stranger()])
def test_a_path_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(KVClusterError, match="configuration"):
        load(value)
    with pytest.raises(KVClusterError, match="disk_dir"):
        kvcluster.local(ray=False, disk_bytes="1MiB", host_bytes="1MiB", disk_dir=value or 7)


@pytest.mark.parametrize("argument", ["shards", "ram_bytes", "host_bytes", "disk_bytes", "port", "ray"])
@settings(max_examples=15)
@given(value=anything.filter(lambda value: not isinstance(value, (int, str))))
def test_a_local_cluster_names_the_argument_that_is_wrong(argument: str, value: Any) -> None:
    with pytest.raises(KVClusterError, match=argument):
        kvcluster.local(**{"ray": False, argument: value})


@settings(max_examples=40)
@given(group=anything, part=anything)
def test_a_part_of_another_type_is_refused(group: Any, part: Any) -> None:
    spec = kvcluster.KVSpec.uniform(**UNIFORM)
    for check in (lambda: spec.check_part(group, part), lambda: spec.check_part(0, part)):
        with pytest.raises(KVClusterError, match=r"part|group"):
            check()


def test_more_layers_than_a_spec_can_have_take_no_memory() -> None:
    for make in (
        lambda: kvcluster.Group(range(2**40), (PLANE,)),
        lambda: kvcluster.KVSpec.uniform(**UNIFORM | {"num_layers": 2**40}),
    ):
        with pytest.raises(KVClusterError, match=r"num_layers must be at most 1024|layers has more than 1024"):
            make()
