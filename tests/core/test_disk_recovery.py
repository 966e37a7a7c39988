"""What a shard does with the pages and tombstones that it finds on disk when it starts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvcluster.core import codecs, limits
from kvcluster.core.codecs import Codec
from kvcluster.core.file_allocator import HEAD_BYTES, SECTOR_BYTES
from kvcluster.core.ids import Attempt, BlockHash, CallId, Epoch, Tenant
from kvcluster.core.messages import (
    AttachedShard,
    Effect,
    Erase,
    Inventory,
    Move,
    PageEvent,
    PageKey,
    PageSlot,
    Pin,
    PurgedEvent,
    RemovedEvent,
    ShardMessage,
    Stage,
    Staged,
    Tier,
    TierUse,
    Tombstone,
    Written,
)
from kvcluster.core.miss import Loss, MissReason
from kvcluster.core.shard.disk_recovery import NO_STORE, RecoveredPage, RecoveredPages
from kvcluster.core.spec import KVSpec
from kvcluster.replay.core_stepper import build_request
from tests.core.lone_shard import BLOCKS, OTHER, A, B, C, LoneShard, counters, inventory, misses, moves, pinned, report
from tests.core.samples import CODED, LEFT, MIXED, OURS, PAGE, RIGHT, SECOND, SPEC, THEIRS, attempt, key, root

FIRST = HEAD_BYTES + SECTOR_BYTES
FILE = FIRST + 4 * SECTOR_BYTES
"""One of four slots, of a sector each; one sector has all their records."""
FILES = 4


class DiskShard(LoneShard):
    """A shard with a disk tier. The test also plays the drive, which reads for waiting readers."""

    def __init__(
        self,
        pages: int = 8,
        epoch: int = 7,
        *,
        host_pages: int = 8,
        found: RecoveredPages = NO_STORE,
        spec: KVSpec = CODED,
        **config: int,
    ) -> None:
        self.stages: list[Stage] = []  # what is being read
        super().__init__(pages, epoch, host_pages=host_pages, found=found, spec=spec, **({"extent_bytes": 64} | config))

    @classmethod
    def knowing(cls, found: RecoveredPages, *, spec: KVSpec = CODED, **config: int) -> DiskShard:
        """One that a coordinator knows, with our `spec` attached, and with what it has found told."""
        shard = cls(found=found, spec=spec, **config)
        shard.attach(spec)
        shard.settle()
        assert shard.core.state.member(shard.now)
        return shard

    def step(self, message: ShardMessage) -> list[Effect]:
        effects = super().step(message)
        self.stages += [effect for effect in effects if isinstance(effect, Stage)]
        return effects

    def pinning(self, of: Attempt, *blocks: BlockHash, tenant: Tenant = OURS, accept: Loss = Loss.Q4) -> CallId:
        """A pin whose pages may have to be read."""
        keys = tuple(map(key, blocks))
        return self.call(build_request(Pin(of, self.epoch, keys, accept), tenant, self.space))

    def read(self, *corrupt: int, which: int = 0) -> list[Effect]:
        """What one of those who wait wants has been read; those of it are corrupt."""
        return self.step(Staged(self.stages.pop(which).attempt, corrupt))

    def order_moves(self, to: Tier, *blocks: BlockHash) -> list[Effect]:
        """Lets the next heartbeat bring back the order to move these."""
        return self.order(moves(*[Move(self.space, block, to, Codec.Q8) for block in blocks]))


def place(slot: int, file: int = 0) -> int:
    """Returns the offset of a slot in a file."""
    return file * FILE + FIRST + slot * SECTOR_BYTES


def lying(
    *names: BlockHash | PageKey,
    spec: KVSpec = CODED,
    tenant: Tenant = OURS,
    codec: Codec = Codec.Q8,
    loss: Loss | None = None,
    file: int = 0,
) -> list[RecoveredPage]:
    """Pages of a chain of blocks as a file has them, from its first slot on."""
    keys = [name if isinstance(name, tuple) else PageKey(name, 0, spec.whole(0)) for name in names]
    blocks = list(dict.fromkeys(name.hash for name in keys))
    parents = dict(zip(blocks, (root(spec, tenant), *blocks), strict=False))
    return [
        RecoveredPage(
            namespace=spec.namespace(tenant),
            key=name,
            parent=parents[name.hash],
            depth=blocks.index(name.hash),
            loss=codec.loss if loss is None else loss,
            codec=codec,
            nbytes=codecs.page_bytes(codec, spec, name.group, name.part),
            sums=b"sums of " + name.hash,
            offset=place(slot, file),
        )
        for slot, name in enumerate(keys)
    ]


def found(
    *pages: RecoveredPage,
    specs: Sequence[tuple[Tenant, KVSpec]] = ((OURS, CODED),),
    tombstones: Sequence[Tombstone] = (),
    files: int = FILES,
) -> RecoveredPages:
    return RecoveredPages(files * FILE, FILE, tuple(specs), tuple(pages), tuple(tombstones))


def event(page: RecoveredPage) -> PageEvent:
    """Returns the event that reports the page."""
    return PageEvent(page.namespace, page.key, page.parent, page.depth, Tier.DISK, page.loss, page.codec)


def first_words(shard: LoneShard) -> Inventory:
    """Its first inventory, to a coordinator that it does not know yet."""
    shard.attach(shard.spec)
    said = inventory(shard)
    shard.settle()
    return said


def on_disk(shard: LoneShard) -> tuple[RecoveredPage, ...]:
    """Returns what the next shard finds if this one ends now."""
    pages = [page for page in shard.core.pool.ready() if page.tier is Tier.DISK]
    return tuple(
        RecoveredPage(
            *(page.space, page.key, page.parent, page.depth, page.loss, page.codec, page.nbytes, page.sums, page.offset)
        )
        for page in pages
    )


def used(shard: LoneShard) -> int:
    """Slots on disk."""
    return shard.core.pool.allocators[Tier.DISK].used_bytes // SECTOR_BYTES


# -------------------------------------------------------------------------------------------------- pages


def test_what_is_found_is_told_of_with_its_spec_in_the_first_inventory() -> None:
    pages = lying(A, B, C)
    said = first_words(DiskShard(found=found(*pages)))
    assert said.pages == tuple(map(event, pages))
    assert said.specs == ((OURS, CODED),)
    assert [(page.parent, page.depth) for page in said.pages] == [(root(CODED), 0), (A, 1), (B, 2)]
    assert said.info.others[1] == TierUse(Tier.DISK, FILES * FILE, (FILES - 1) * FILE + SECTOR_BYTES, 3)


def test_what_is_found_is_no_news_after_the_inventory_and_nothing_that_this_shard_has_done() -> None:
    shard = DiskShard.knowing(found(*lying(A, B)))
    assert not any(counters(shard).values())
    assert shard.settle() == []


def test_a_recovered_page_is_read_as_its_record_says() -> None:
    [page] = lying(A)
    shard = DiskShard.knowing(found(page))
    call = shard.pinning(attempt(1), A)
    [move] = shard.stages[0].pages
    source = move.source
    assert (source.offset, source.nbytes, source.tier) == (page.offset, page.nbytes, Tier.DISK)
    assert (source.loss, source.codec, source.sums) == (page.loss, page.codec, page.sums)
    shard.read()
    [slot] = pinned(shard.replies[call])
    assert (slot.key, slot.loss, slot.codec, slot.sums) == (page.key, page.loss, page.codec, page.sums)


def test_pages_of_several_namespaces_are_found_each_in_a_file_of_its_own() -> None:
    ours, theirs = lying(A, B), lying(A, tenant=THEIRS, file=1)
    mixed = lying(PageKey(A, 1, MIXED.whole(1)), spec=MIXED, codec=Codec.RAW, file=2)
    specs = [(OURS, CODED), (THEIRS, CODED), (OURS, MIXED)]
    said = first_words(DiskShard(found=found(*ours, *theirs, *mixed, specs=specs)))
    assert said.pages == tuple(map(event, (*ours, *theirs, *mixed)))
    assert list(said.specs) == specs


def test_pages_that_codecs_leave_as_they_are_are_found_as_they_are() -> None:
    pages = lying(*BLOCKS[:2], spec=SPEC, codec=Codec.RAW)
    assert pages[0].nbytes == PAGE
    shard = DiskShard.knowing(found(*pages, specs=[(OURS, SPEC)]), spec=SPEC)
    call = shard.pinning(attempt(1), A, accept=Loss.EXACT)
    shard.read()
    assert [(slot.codec, slot.loss) for slot in pinned(shard.replies[call])] == [(Codec.RAW, Loss.EXACT)]


def test_the_next_shard_has_what_the_last_one_had_on_disk() -> None:
    last = DiskShard.knowing(found(*lying(A)))
    last.store(attempt(1), B, key(C, LEFT), key(C, RIGHT))
    for tier in (Tier.HOST, Tier.DISK):
        last.order_moves(tier, B, C)
        last.move_all()
    pages = on_disk(last)
    assert [page.key for page in pages] == [key(A), key(B), key(C, LEFT), key(C, RIGHT)]
    for order in (pages, pages[::-1]):
        following = DiskShard.knowing(found(*order))
        assert on_disk(following) == order
        assert following.core.pool.others()[1] == last.core.pool.others()[1]


@pytest.mark.parametrize("specs", [[], [(THEIRS, CODED)], [(OURS, OTHER)]], ids=["no", "another's", "another"])
def test_pages_of_a_namespace_that_no_spec_names_are_passed_over(specs: list[tuple[Tenant, KVSpec]]) -> None:
    shard = DiskShard(found=found(*lying(A), specs=specs))
    assert first_words(shard).pages == ()
    assert used(shard) == 0
    assert misses(shard.pin(attempt(1), A, accept=Loss.Q4)) == [MissReason.EVICTED]


def test_a_namespace_of_which_nothing_is_found_may_be_forgotten_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMESPACES_PER_TENANT", 1)
    shard = DiskShard(found=found(specs=[(OURS, OTHER)]))
    assert isinstance(shard.attach(CODED), AttachedShard)


def test_a_namespace_of_which_pages_are_found_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMESPACES_PER_TENANT", 1)
    shard = DiskShard(found=found(*lying(A)))
    assert not isinstance(shard.attach(OTHER), AttachedShard)
    assert isinstance(shard.attach(CODED), AttachedShard)


@pytest.mark.parametrize(
    "offset",
    [0, HEAD_BYTES, place(0) + 1, place(4), FILES * FILE + place(0), -FILE + place(0)],
    ids=["in the head", "among the records", "askew", "behind the last slot", "in no file", "before all files"],
)
def test_a_page_that_cannot_lie_where_it_claims_to_is_passed_over(offset: int) -> None:
    good, bad = lying(A, B)
    shard = DiskShard(found=found(bad._replace(offset=offset), good))
    assert first_words(shard).pages == (event(good),)
    assert used(shard) == 1


def test_of_a_page_that_is_found_twice_the_first_is_kept() -> None:
    first, second = lying(A, B)
    again = first._replace(offset=second.offset, sums=second.sums)
    shard = DiskShard.knowing(found(first, again))
    assert on_disk(shard) == (first,)
    assert used(shard) == 1


def test_of_two_pages_in_one_place_the_first_is_kept() -> None:
    first, second = lying(A, B)
    shard = DiskShard.knowing(found(first, second._replace(offset=first.offset)))
    assert on_disk(shard) == (first,)


def test_a_page_in_a_file_of_others_is_passed_over() -> None:
    ours, *theirs = (*lying(A), *lying(A, B, tenant=THEIRS))
    shard = DiskShard(found=found(ours, *theirs, specs=[(OURS, CODED), (THEIRS, CODED)]))
    said = first_words(shard)
    assert said.pages == (event(ours),)
    assert list(said.specs) == [(OURS, CODED)]


def test_room_beside_what_was_found_is_for_other_pages_of_its_kind() -> None:
    pages = lying(A, B, C)
    shard = DiskShard.knowing(found(pages[0], pages[2], files=1))
    shard.store(attempt(1), B)
    for tier in (Tier.HOST, Tier.DISK):
        shard.order_moves(tier, B)
        shard.move_all()
    assert {page.key.hash: page.offset for page in on_disk(shard)} == {A: place(0), B: place(1), C: place(2)}


def test_what_was_found_is_evicted_by_an_order_with_all_parts_of_its_block() -> None:
    pages = lying(key(A, LEFT), key(A, RIGHT), key(B, LEFT))
    shard = DiskShard.knowing(found(*pages))
    shard.evict(A, tier=Tier.DISK)
    gone = [RemovedEvent(shard.space, key(A, part), corrupt=False, tier=Tier.DISK) for part in (LEFT, RIGHT)]
    assert shard.settle() == gone
    assert used(shard) == 1
    assert counters(shard)["evicted"] == 2


def test_what_was_found_is_not_written_again_but_with_less_loss() -> None:
    shard = DiskShard.knowing(found(*lying(A)))
    assert shard.reserve(attempt(1), A, loss=Loss.Q8) == (Written.DUPLICATE,)
    [page] = shard.reserve(attempt(2), A)
    assert isinstance(page, PageSlot)
    shard.commit(attempt(2), 0)
    assert shard.settle() == [
        PageEvent(shard.space, key(A), root(), 0, Tier.RAM, Loss.EXACT),
        RemovedEvent(shard.space, key(A), corrupt=False, tier=Tier.DISK),
    ]
    assert used(shard) == 0


def test_what_was_found_comes_up_like_what_went_down() -> None:
    [page] = lying(A)
    shard = DiskShard.knowing(found(page))
    shard.order_moves(Tier.RAM, A)
    shard.move()
    assert shard.settle() == [PageEvent(*event(page)[:4], Tier.RAM, Loss.Q8)]
    shard.evict(A, tier=Tier.DISK)
    assert [gone.tier for gone in shard.settle() if isinstance(gone, RemovedEvent)] == [Tier.DISK, Tier.RAM]


def scrubs_nothing_but(shard: DiskShard, block: BlockHash) -> None:
    """Round after round."""
    for _ in range(3):
        shard.later(20 * SECOND)
        shard.settle()
        assert shard.reading is not None
        assert [slot.key for slot in shard.reading.slots] == [key(block)]
        shard.verdict()


def test_a_recovered_page_is_not_read_until_a_reader_wants_it() -> None:
    shard = DiskShard.knowing(found(*lying(A)), scrub_bytes=2**20)
    shard.store(attempt(1), B)
    scrubs_nothing_but(shard, B)
    assert shard.stages == []


def test_a_page_demoted_to_disk_is_not_read_until_a_reader_wants_it() -> None:
    shard = DiskShard.knowing(found(), scrub_bytes=2**20)
    shard.store(attempt(1), A, B)
    for tier in (Tier.HOST, Tier.DISK):
        shard.order_moves(tier, A)
        shard.move_all()
    if shard.reading is not None:  # what was READY before
        shard.verdict()
    scrubs_nothing_but(shard, B)


# --------------------------------------------------------------------------------------------- tombstones


def test_tombstones_that_were_kept_are_told_in_every_chunk_of_an_inventory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INVENTORY_CHUNK", 2)
    stones = (Tombstone(3, THEIRS), Tombstone(5, OURS, model="other"))
    shard = DiskShard(found=found(*lying(A, B, C), tombstones=stones))
    shard.attach(CODED)
    shard.answer()  # a coordinator is there: it is told from the beginning
    assert (inventory(shard).chunk, inventory(shard).tombstones) == (0, stones)
    shard.answer()
    assert (inventory(shard).chunk, inventory(shard).tombstones) == (1, stones)


def test_a_tombstone_that_was_kept_is_not_carried_out_on_what_was_found() -> None:
    pages = lying(A)
    shard = DiskShard(found=found(*pages, tombstones=[Tombstone(3, OURS)]))
    assert first_words(shard).pages == tuple(map(event, pages)), "it was written since"
    assert shard.erased == []


def test_a_tombstone_that_was_kept_is_not_carried_out_again_and_a_later_one_is() -> None:
    old, new = Tombstone(3, OURS, model="m"), Tombstone(5, OURS, weights="sha256:1")
    shard = DiskShard.knowing(found(*lying(A), tombstones=[old]))
    shard.hear(tombstones=(old,))
    assert shard.settle() == [] and shard.erased == []
    assert used(shard) == 1
    shard.hear(tombstones=(old, new))
    assert shard.settle() == [PurgedEvent(5)]
    assert shard.erased == [Erase(purged=(new,), tombstones=(old, new))]
    assert used(shard) == 0
    assert counters(shard)["purged"] == 1
    assert misses(shard.pin(attempt(1), A, accept=Loss.Q4)) == [MissReason.EVICTED]


def test_what_is_purged_is_erased_once_however_often_it_is_told() -> None:
    stone = Tombstone(5, OURS)
    shard = DiskShard.knowing(found(*lying(A)))
    for _ in range(2):
        shard.hear(tombstones=(stone,))
    assert shard.erased == [Erase((stone,), (stone,))]


def test_purges_that_come_together_are_one_erasure_of_which_all_are_named() -> None:
    stones = (Tombstone(5, OURS, model="m"), Tombstone(6, OURS), Tombstone(7, THEIRS))
    shard = DiskShard.knowing(found(*lying(A)))
    shard.hear(tombstones=stones)
    assert shard.settle() == [PurgedEvent(5), PurgedEvent(6), PurgedEvent(7)]
    [erased] = shard.erased
    assert erased.purged == stones
    assert erased.tombstones == stones[1:], "the second says what the first says"


def test_a_purge_that_names_nothing_here_is_kept_beside_what_was_found() -> None:
    kept, new = Tombstone(3, OURS, model="other"), Tombstone(5, THEIRS)
    shard = DiskShard.knowing(found(*lying(A), tombstones=[kept]))
    shard.hear(tombstones=(new,))
    assert shard.erased == [Erase((new,), (kept, new))]
    assert used(shard) == 1


def test_without_a_disk_tier_a_purge_erases_nothing() -> None:
    shard = DiskShard.knowing(NO_STORE)
    shard.store(attempt(1), A)
    shard.hear(tombstones=(Tombstone(5, OURS),))
    assert shard.settle() == [PurgedEvent(5)]
    assert shard.erased == []


def test_a_purge_comes_to_a_namespace_that_no_worker_has_attached() -> None:
    shard = DiskShard.knowing(found(*lying(A, tenant=THEIRS), specs=[(THEIRS, CODED)]))
    shard.hear(tombstones=(Tombstone(5, THEIRS),))
    assert shard.settle() == [PurgedEvent(5)]
    assert used(shard) == 0


def test_a_new_coordinator_is_told_what_was_carried_out_here_and_before() -> None:
    kept, new = Tombstone(3, OURS, model="other"), Tombstone(5, THEIRS)
    shard = DiskShard.knowing(found(*lying(A), tombstones=[kept]))
    shard.hear(tombstones=(new,))
    shard.settle()
    shard.later(SECOND)
    shard.coordinator = Epoch(200)
    shard.answer()
    said = inventory(shard)
    assert said.tombstones == (kept, new)
    assert said.pages == tuple(map(event, lying(A)))


# ------------------------------------------------------------------------------------------------ no folder


def test_why_there_is_no_disk_tier_is_told_with_every_report() -> None:
    shard = DiskShard.knowing(RecoveredPages(trouble="another process uses it"))
    for _ in range(2):
        shard.later(SECOND)
        assert report(shard).info.trouble == "another process uses it"
        assert report(shard).info.tiers == (Tier.RAM, Tier.HOST)
        shard.settle()


def test_without_its_disk_tier_a_shard_serves_memory() -> None:
    shard = DiskShard.knowing(RecoveredPages(trouble="no room"))
    shard.store(attempt(1), A)
    shard.order_moves(Tier.HOST, A)
    shard.move_all()
    shard.order_moves(Tier.DISK, A)
    assert shard.moving is None
    assert [slot.tier for slot in pinned(shard.pin(attempt(2), A, accept=Loss.Q8))] == [Tier.HOST]


def test_a_shard_with_a_folder_tells_of_no_trouble() -> None:
    shard = DiskShard.knowing(found())
    shard.later(SECOND)
    assert (report(shard).info.trouble, report(shard).info.tiers) == ("", (Tier.RAM, Tier.HOST, Tier.DISK))
