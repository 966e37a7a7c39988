"""The sink of one exchange of a load: it takes layers into the caller's memory, verifies them there, and counts them.

It writes what its exchange owns and no more (read_ranges.py), a chunk at a time under the gate of its ranges.


Bytes are read straight to where they belong if that is one run of bytes. A strided destination gets them from a buffer
beside it, verified before they are put. What comes encoded is verified as it came, in a buffer, and decoded from there.
Any way a chunk is verified, and decoded, while it is still in the cache.

What does not verify may lie in the caller's memory, but is never told to have come: its block has failed, unless
another shard's bytes take the place of these. A bulk load is made of many thousand records, so what holds for all
records of a page is worked out once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcluster.client.load_progress import LoadProgress
from kvcluster.client.memory import Bound, Staging
from kvcluster.client.pieces import Piece
from kvcluster.client.read_ranges import ReadRanges
from kvcluster.core import limits
from kvcluster.core.codecs import Codec, layer_bytes
from kvcluster.core.ids import NamespaceId
from kvcluster.core.reasons import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import ProtocolError
from kvcluster.pages import checksum, codec
from kvcluster.transport.seam import Payload


@dataclass(eq=False, slots=True)
class _Target:
    """Where one piece goes, and what it must be."""

    piece: Piece
    start: int  # its layers, counted from its page's first
    stop: int
    layer_bytes: int
    place: memoryview | None  # where it lies, if that is one run of bytes
    model_layers: tuple[int, ...]  # the model's own numbers of its layers
    form: _Form | None = None  # that came last


@dataclass(eq=False, slots=True)
class _Form:
    """In which codec a page comes."""

    codec_id: int
    layer_bytes: int
    identity: int
    coder: codec.Coder | None  # None where it comes raw


class Sink:
    """Of one exchange with one shard: a PageSink. `layer_came` is called when some layer is there of every block."""

    def __init__(
        self,
        namespace: NamespaceId,
        spec: KVSpec,
        into: Bound,
        ranges: ReadRanges,
        progress: LoadProgress,
        layer_came: Callable[[], object],
    ) -> None:
        self._namespace = namespace
        self._spec = spec
        self._into = into
        self._ranges = ranges
        self._progress = progress
        self._layer_came = layer_came
        self._targets: list[_Target | None] = [None] * len(ranges.pieces)
        self._staging = Staging()
        self._decoded = Staging()

    # --------------------------------------------------------------------------------------- what comes

    def receive(self, item: int, layer: int, codec_id: int, sums: Sequence[int], data: Payload) -> None:
        target = self._targets[item] or self._target(item)
        stop = layer + len(sums)
        if stop > target.stop:
            raise ProtocolError(f"layers to {stop} of a page came of which those to {target.stop} were asked for")
        form = target.form
        if form is None or form.codec_id != codec_id:
            form = target.form = self._form(item, target, codec_id)
        if form is None or data.nbytes != len(sums) * form.layer_bytes:
            self._take_none(item, layer, stop)
            return
        step = max(1, limits.CHUNK_BYTES // form.layer_bytes)
        at_once = len(sums) if data.present is not None and target.place is not None else step
        for at in range(0, len(sums), at_once):
            if not self._take(item, target, form, layer + at, sums[at : at + at_once], data):
                return

    def _take(self, item: int, target: _Target, form: _Form, layer: int, sums: Sequence[int], data: Payload) -> bool:
        """Some layers into the caller's memory, and verified. False where others bring them."""
        stop, place = layer + len(sums), _place(target, layer, layer + len(sums))
        nbytes = len(sums) * form.layer_bytes
        view = place if place is not None and form.coder is None else self._staging.room(nbytes)
        got, whole = 0, False
        while True:
            with self._ranges.gate:
                if not self._ranges.may_write(item, layer, time.monotonic_ns()):
                    return False
                here = None if place is None else data.present
                if here is not None and here.nbytes == nbytes:
                    came = checksum.copy_sums(form.identity, layer, len(sums), view, here)
                    whole = self._count(item, target, form, layer, stop, came == tuple(sums), view)
                    break
                got += data.read_into(view[got:] if got else view)
                if got == nbytes:
                    right = checksum.first_mismatch(form.identity, layer, sums, view) is None
                    whole = self._count(item, target, form, layer, stop, right, view)
                    break
            data.wait()
        if whole:
            self._layer_came()
        return True

    def _count(
        self, item: int, target: _Target, form: _Form, layer: int, stop: int, verified: bool, view: memoryview
    ) -> bool:
        """Those layers have come. True where some layer is there of every block by that."""
        if not verified:
            self._ranges.did_not_match(item, layer, stop)
            return False
        self._ranges.came(item, stop)
        piece, place, nbytes = target.piece, _place(target, layer, stop), (stop - layer) * target.layer_bytes
        if form.coder is not None:
            encoded, view = view, self._decoded.room(nbytes) if place is None else place
            form.coder.decode(encoded, view, stop - layer)
        if place is None:
            self._into.put(piece.block, piece.group, piece.rect_of(layer, stop), view, piece.fills)
        layers = target.model_layers[layer - target.start : stop - target.start]
        return self._progress.came(piece.block, layers, nbytes)

    def _take_none(self, item: int, layer: int, stop: int) -> None:
        """What came cannot be what was asked for."""
        with self._ranges.gate:
            if self._ranges.may_write(item, layer, time.monotonic_ns()):
                self._ranges.did_not_match(item, layer, stop)

    def _target(self, item: int) -> _Target:
        piece = self._ranges.pieces[item]
        want, part = piece.want, piece.want.key.part
        target = self._targets[item] = _Target(
            piece,
            want.layer_start,
            want.layer_stop,
            self._spec.layer_bytes(piece.group, part),
            self._into.place(piece.block, piece.group, piece.rect) if piece.fills == piece.rect else None,
            piece.model_layers(self._spec),
        )
        return target

    def _form(self, item: int, target: _Target, codec_id: int) -> _Form | None:
        """How this page comes. None where nobody here can decode it."""
        why = codec.check_codec(codec_id)
        if why is not None:
            self._ranges.unreadable[item] = Miss(MissReason.LOSSY, why)
            return None
        known, key, spec = Codec(codec_id), target.piece.want.key, self._spec
        identity = checksum.identity(self._namespace, key, codec_id)
        if known is Codec.RAW:
            return _Form(codec_id, target.layer_bytes, identity, None)
        group, shape = spec.groups[key.group], {"block_tokens": spec.block_tokens, "heads": key.part.heads}
        return _Form(codec_id, layer_bytes(known, group, **shape), identity, codec.coder(known, group, **shape))


def _place(target: _Target, layer: int, stop: int) -> memoryview | None:
    """Where these layers of it lie, if that is one run of bytes."""
    if target.place is None:
        return None
    return target.place[(layer - target.start) * target.layer_bytes : (stop - target.start) * target.layer_bytes]
