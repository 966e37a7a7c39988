from __future__ import annotations

from kvcluster.core.miss import Loss, Miss, MissReason


def test_more_loss_is_larger_so_that_what_a_caller_accepts_is_a_comparison() -> None:
    assert Loss.EXACT < Loss.Q8 < Loss.Q4
    assert [loss for loss in Loss if loss <= Loss.Q8] == [Loss.EXACT, Loss.Q8]


def test_every_reason_is_a_word_that_explain_can_print() -> None:
    assert [reason.value for reason in MissReason] == [
        *("never_seen", "evicted", "pending", "below_block", "namespace", "part", "lossy", "corrupt"),
        *("shard_lost", "rebuilding", "full", "deadline", "slower_than_recompute", "off", "coordinator_lost"),
        "device_lost",
    ]


def test_a_miss_says_its_detail_only_where_it_has_one() -> None:
    assert str(Miss(MissReason.NEVER_SEEN)) == "never_seen"
    assert str(Miss(MissReason.NAMESPACE, "weights")) == "namespace (weights)"


def test_misses_are_compared_by_what_they_say() -> None:
    assert Miss(MissReason.EVICTED, "4 s ago") == Miss(MissReason.EVICTED, "4 s ago")
    assert Miss(MissReason.EVICTED, "4 s ago") != Miss(MissReason.EVICTED, "5 s ago")
    assert len({Miss(MissReason.FULL), Miss(MissReason.FULL), Miss(MissReason.PENDING)}) == 2
