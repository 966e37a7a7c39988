"""Arrays of other libraries: what they hold is moved as it is, and they live as long as the call needs them."""

from __future__ import annotations

import array
import gc
import mmap
from typing import Any

import numpy as np
import pytest
import torch

from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError
from kvcluster.memory import native
from kvcluster.memory.arena import Staging
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.array_views import array_view
from kvcluster.transfers.bound_memory import bind
from tests.client.build import BLOCK, SPEC, kv, prompt, room, same, shape_of, spec_of

BLOCKS = 2


class Exported:
    """An array that has DLPack alone: `made` makes what is exported, by the arguments of the call."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def __dlpack__(self, **arguments: Any) -> Any:
        return self._made(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def bits_of(values: torch.Tensor) -> np.ndarray:
    """The bits of values that numpy has no dtype for, over the same memory."""
    return values.view({2: torch.uint16, 1: torch.uint8}[values.element_size()]).numpy()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_integers_stand_for_the_bits_of_dtypes_that_numpy_lacks(cluster: MemoryCluster, dtype: str) -> None:
    spec = spec_of(dtype=dtype)
    client, values = cluster.client(spec), kv(BLOCKS, spec=spec)
    assert client.store(prompt(BLOCKS), bits_of(values)).blocks == BLOCKS
    assert client.flush()
    into = room(BLOCKS, spec)
    assert client.load(prompt(BLOCKS), bits_of(into)) == BLOCKS * BLOCK
    assert same(into, values)


@pytest.mark.parametrize("dtype", [np.uint16, np.int16, np.float32, np.complex64, np.int64, np.dtype("V4")])
def test_an_array_of_another_dtype_is_refused_with_both(cluster: MemoryCluster, dtype: Any) -> None:
    client = cluster.client(spec_of(dtype="float16"))
    with pytest.raises(CallerError, match=r"the source is .*; expected"):
        client.store(prompt(BLOCKS), np.zeros(shape_of(BLOCKS), dtype))


def test_a_field_of_records_is_refused() -> None:
    records = np.zeros(shape_of(BLOCKS), np.dtype([("tag", np.uint8), ("value", np.float32)]))
    with pytest.raises(CallerError, match="no field of records"):
        bind(records["value"], SPEC, (SPEC.whole(0),), BLOCKS, writable=False)


def test_memory_that_only_its_export_keeps_lives_as_long_as_it_is_bound() -> None:
    values = kv(BLOCKS)
    bound = bind(Exported(lambda **_: values.clone().__dlpack__()), SPEC, (SPEC.whole(0),), BLOCKS, writable=False)
    gc.collect()
    taken = [torch.zeros(values[0].numel()) for _ in range(64)]  # and so would memory that was freed
    page = bound.get(1, 0, 0, 3, Staging())
    assert bytes(page) == values[1].numpy().tobytes() and len(taken) == 64


def test_an_export_is_asked_not_to_be_a_copy_and_one_of_old_as_it_can_be() -> None:
    asked: list[dict[str, Any]] = []

    def made(**arguments: Any) -> Any:
        asked.append(arguments)
        if "copy" in arguments and len(asked) == 2:
            raise TypeError("unexpected keyword argument 'copy'")
        return torch.zeros(3).__dlpack__()

    for _ in range(2):
        view = array_view(Exported(made), "it")
        assert view is not None and (view.shape, view.strides, view.dtype) == ((3,), (4,), "float32")
    assert [sorted(arguments) for arguments in asked] == [["copy", "max_version"]] * 2 + [["max_version"]]


@pytest.mark.parametrize("made", [lambda **_: object(), lambda **_: torch.zeros(2).bool().__dlpack__("no stream")])
def test_an_export_that_fails_is_refused_by_name(made: Any) -> None:
    with pytest.raises(CallerError, match=r"the source .*DLPack"):
        bind(Exported(made), SPEC, (SPEC.whole(0),), BLOCKS, writable=False)


def test_without_the_native_core_an_array_with_dlpack_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "KERNELS", None)
    with pytest.raises(CallerError, match="it has DLPack alone, which takes kvcluster's native core"):
        array_view(Exported(lambda **_: torch.zeros(3).__dlpack__()), "it")
    assert array_view(np.zeros(3), "it") is not None


@pytest.mark.parametrize(
    ("memory", "shape", "strides", "dtype", "readonly"),
    [
        (b"bytes", (5,), (1,), "uint8", True),
        (bytearray(5), (5,), (1,), "uint8", False),
        (memoryview(bytearray(6))[::2], (3,), (2,), "uint8", False),
        (mmap.mmap(-1, 4096), (4096,), (1,), "uint8", False),
        (array.array("f", [1, 2]), (2,), (4,), "float32", False),
        (memoryview(bytes(12)).cast("f", [1, 3]), (1, 3), (12, 4), "float32", True),
        (np.zeros((2, 3), np.float16).T, (3, 2), (2, 6), "float16", False),
    ],
)
def test_a_view_says_how_an_array_lies(memory: Any, shape: Any, strides: Any, dtype: str, readonly: bool) -> None:
    view = array_view(memory, "it")
    assert view is not None
    assert (view.shape, view.strides, view.dtype, view.readonly) == (shape, strides, dtype, readonly)
    assert view.address


@pytest.mark.parametrize("value", [None, 3, "text", [1.0], {}])
def test_what_is_no_array_has_no_view(value: Any) -> None:
    assert array_view(value, "it") is None


def test_bytes_are_served_for_planes_that_no_tensor_holds(cluster: MemoryCluster) -> None:
    from kvcluster.core.groups import Group, Plane

    planes = (Plane("k", 1, 6, "float16"), Plane("v", 1, 4, "float16"), Plane.opaque("state", 5))
    spec = KVSpec(model="m", weights="sha256:0", block_tokens=BLOCK, groups=(Group((0, 1), planes),))
    client, page = cluster.client(spec), bytes(range(spec.block_bytes))
    assert client.store(prompt(1), page).blocks == 1
    assert client.flush()
    into = bytearray(2 * len(page))
    assert client.load(prompt(1), into) == BLOCK
    assert into == page + bytes(len(page)), "room for more blocks stays as it was"
