"""The native core does exactly what Python does, on every instruction set of this machine."""

from __future__ import annotations

import ctypes
import itertools
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvcluster.memory import checksum, native

u64 = st.integers(0, 2**64 - 1)
# Around the stripes of 64 bytes and the blocks of 1,024 that XXH3 has, and anything between.
layer_bytes = st.one_of(
    st.integers(native.LEAST_LAYER_BYTES, 1_200),
    st.builds(lambda blocks, beside: 1_024 * blocks + beside, st.integers(1, 5), st.integers(-65, 65)),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layer_bytes, st.integers(1, 5), u64, u64, st.integers(0, 64), st.integers(0, 64), st.randoms())
def test_sums_and_copies_are_those_of_xxhash_and_of_memcpy(
    kernels: str, nbytes: int, layers: int, seed: int, step: int, skip: int, place: int, random: object
) -> None:
    assert native.KERNELS is not None
    size = nbytes * layers
    data = memoryview(random.randbytes(skip + size))[skip:]  # type: ignore[attr-defined]
    expected = tuple(
        xxh3_64_intdigest(data[layer * nbytes : (layer + 1) * nbytes], (seed + layer * step) % 2**64)
        for layer in range(layers)
    )
    assert native.KERNELS.sums(data, layers, seed, step) == expected
    room = bytearray(b"\xaa" * (place + size + 80))
    assert native.KERNELS.copy_sums(memoryview(room)[place : place + size], data, layers, seed, step) == expected
    assert room == b"\xaa" * place + bytes(data) + b"\xaa" * 80, "the copy, and nothing beside it"


@given(st.integers(1, 700), st.integers(1, 4), u64, st.integers(0, 2**16), st.randoms())
def test_python_alone_does_the_same(nbytes: int, layers: int, identity: int, first: int, random: object) -> None:
    data = memoryview(random.randbytes(nbytes * layers))  # type: ignore[attr-defined]
    copies = []
    for kernels in (native.KERNELS, None):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(native, "KERNELS", kernels)
            into = bytearray(len(data))
            sums = checksum.copy_sums(identity, first, layers, memoryview(into), data)
            assert sums == checksum.layer_sums(identity, first, layers, data)
            assert into == data
            copies.append(sums)
    assert copies[0] == copies[1]


def test_python_alone_copies_more_than_a_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "KERNELS", None)
    data = memoryview(bytes(range(256)) * 4_096)
    into = bytearray(len(data))
    assert checksum.copy_sums(7, 3, 32, memoryview(into), data) == checksum.layer_sums(7, 3, 32, data)
    assert into == data
    assert native.name() == "python"


ENOUGH = 20
"""Torn copies: a sum of the original would be another than that of most of them. How many come of a try is the
machine's affair."""


def test_a_sum_vouches_for_the_copy_though_the_original_changes_meanwhile(kernels: str) -> None:
    """The arena is written while it is copied, as happens when a reader stalls and its page is reused."""
    assert native.KERNELS is not None
    original = bytearray(2**20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(original))
    over = threading.Event()

    def change() -> None:
        for value in itertools.cycle(range(256)):
            ctypes.memset(address, value, len(original))  # while it runs, others do
            if over.is_set():
                return

    changing = threading.Thread(target=change)
    changing.start()
    torn = 0
    try:
        for _ in range(50_000):
            copy = bytearray(len(original))
            sums = native.KERNELS.copy_sums(copy, original, 16, 1, 2)
            assert native.KERNELS.sums(copy, 16, 1, 2) == sums
            torn += copy.count(copy[0]) < len(copy)
            if torn == ENOUGH:
                return
    finally:
        over.set()
        changing.join()
    pytest.fail(f"only {torn} copies were torn: this test has seen too little")


def test_what_does_not_fit_is_refused_and_nothing_is_written(kernels: str) -> None:
    assert native.KERNELS is not None
    data = bytearray(b"x" * 1_024)
    for layers in (0, 3, 5):  # no layers, no whole ones, and too short ones
        with pytest.raises(ValueError, match="240"):
            native.KERNELS.sums(data, layers, 0, 0)
    room = bytearray(1_024)
    with pytest.raises(ValueError, match="as much room"):
        native.KERNELS.copy_sums(memoryview(room)[1:], data, 1, 0, 0)
    with pytest.raises(BufferError):
        native.KERNELS.copy_sums(bytes(room), data, 1, 0, 0)
    with pytest.raises(ValueError, match="onto themselves"):
        native.KERNELS.copy_sums(memoryview(data)[:512], memoryview(data)[256:768], 1, 0, 0)
    with pytest.raises(BufferError):
        native.KERNELS.sums(memoryview(data)[::2], 1, 0, 0)
    assert not any(room)
    assert data == b"x" * 1_024
    with pytest.raises(ValueError, match="no such kernels"):
        native.KERNELS.choose("abacus")


def test_layers_of_few_bytes_are_summed_as_well() -> None:
    """XXH3 treats them otherwise, and the kernels do not know how."""
    data = memoryview(bytes(range(240)))
    into = bytearray(240)
    assert checksum.copy_sums(1, 0, 1, memoryview(into), data) == checksum.layer_sums(1, 0, 1, data)
    assert into == data
