"""The native core (native/module.cpp): sums and copies by the kernels of one instruction set, the choice among those of
this machine, and the codecs.

A layer is a run of bytes of more than 240 (see native.py); `layers` of them, all of one length, lie one after the other
in `data`. The sum of layer i is its XXH3 of 64 bits under the seed `seed + i * step`, mod 2**64. Other threads run
meanwhile, but for the smallest of inputs.
"""

from typing_extensions import Buffer

def sums(data: Buffer, layers: int, seed: int, step: int) -> tuple[int, ...]:
    """The sum of each layer of `data`, which is contiguous.

    ValueError where `data` is not so many layers of more than 240 bytes.
    """

def copy_sums(into: Buffer, data: Buffer, layers: int, seed: int, step: int) -> tuple[int, ...]:
    """Copies `data` to `into` and returns the sums of what was written there, whatever becomes of `data` meanwhile.

    Both are contiguous. ValueError as in `sums`, and where `into` is not as long as `data` or overlaps it; then nothing
    has been written. BufferError where `into` is read-only.
    """

def choose(name: str) -> None:
    """From now on, in this process, the kernels of `name`, one of `names()`; any other is a ValueError. For tests."""

def chosen() -> str:
    """The instruction set of the kernels in use: the last of `names()`, unless another was chosen."""

class Coder:
    """A codec for layers `[planes, tokens, heads, dim]` of one shape (kvcluster/pages/codec.py). Other threads run
    meanwhile."""

    def __init__(self, tokens: int, heads: int, planes: list[tuple[str, str, int, int, int]]) -> None:
        """A plane is its coding, dtype, dim, and its bytes in a layer, raw and encoded. ValueError where these do not
        fit one another."""

    def encode(self, data: Buffer, into: Buffer, layers: int) -> bool:
        """Raw layers into encoded ones; False where they cannot be. ValueError where the lengths are others."""

    def decode(self, data: Buffer, into: Buffer, layers: int) -> None:
        """Encoded layers into raw ones. ValueError likewise."""

    def error(self, data: Buffer, coded: Buffer, layers: int) -> float:
        """What raw layers have lost by being encoded (kvcluster/pages/codec.py). ValueError likewise."""

def names() -> list[str]:
    """The instruction sets that were compiled and that this machine has, the fastest last; at least one."""

class Copies:
    """A batch of copies (kvcluster/pages/copy_batch.py), checked. It holds the columns, which must not be resized as
    long as it lives."""

    def __init__(
        self,
        load: bool,
        pages: Buffer | None,
        geometries: tuple[tuple[object, ...] | None, ...],
        items: tuple[Buffer, ...],
        records: tuple[Buffer, ...],
        coded: list[tuple[int, int, int, object]],
        identities: Buffer,
        status: Buffer,
        cancel: Buffer,
        dropped: Buffer,
        deadline_ns: int,
        most_record_bytes: int,
    ) -> None:
        """`pages`: the bytes that offsets count from; None if offsets are addresses. Each geometry is (layers and heads
        of the part, planes, rows, bases, strides of row, token, head and element, spans, whether rows are addresses);
        `coded` has (codec, group, heads, Coder). ValueError says what contradicts, also where bytes lie outside their
        span; TypeError, that a value has another type or is beyond its range."""

    @property
    def able(self) -> bool:
        """Whether every pending record can be carried out here."""

    def run(self, start: int, stop: int) -> None:
        """Carries out the pending records from `start` to `stop`; other threads run meanwhile."""

def attend(
    *,
    query: int,
    positions: int,
    out: int,
    lse: int,
    tokens: int,
    query_heads: int,
    shape: tuple[int, int, int, int, int],
    coders: list[tuple[int, object, int]],
    heads: tuple[int, int],
    scoring: tuple[float, float, float, int, bool],
    subtree: tuple[int, int],
    spans: list[tuple[int, int, int, int, int]],
    starts: list[int],
    row_spans: list[list[int]],
    row_subtrees: list[tuple[int, int]],
    threads: int,
    deadline_ns: int = 0,
) -> bool:
    """One call of attention (kvcluster/attention/torch_kernel.py). Other threads run meanwhile. False, and no results,
    if `deadline_ns` of the monotonic clock passes before it is done; 0 for none.

    `query` float32 `[tokens, query_heads, key_dim]`, `positions` int64 `[tokens]`, `out` float32
    `[tokens, query_heads, value_dim]` and `lse` float32 `[tokens, query_heads]` are addresses. `shape`: the dtype (0
    bfloat16, 1 float16, 2 float32), block tokens, heads of a page, dims of keys and values. `coders`: (codec, Coder,
    offset of the layer in a page). `scoring`: scale, softcap and its reciprocal or 0, window or 0, causal. A subtree is
    (level, index); those of rows lie within that of the call. A span is (address of int64 addresses, address of int32
    codecs, pages, position, tokens). ValueError says what contradicts; addresses are not checked here.
    """

def merge_results(out: int, lse: int, pairs: list[tuple[int, int]], results: int, rows: int, width: int) -> None:
    """Merges results of later positions, the second of each pair, into those of earlier ones, the first: float32
    `[results, rows, width]` and `[results, rows]`, by address."""

def dlpack_view(capsule: object) -> tuple[int, tuple[int, ...], tuple[int, ...], int, int, int, bool, object]:
    """What a capsule of DLPack describes, which it then no longer does: the address of the first element, the shape,
    the strides in elements, the code, bits and lanes of the dtype, whether it is read-only, and what keeps the memory
    alive. A capsule of before DLPack 1.0 is never read-only. ValueError where it is no capsule, or was used."""
