"""A client's policy towards its shards: which requests it permits, and what the end of an exchange means."""

from __future__ import annotations

import pytest

from kvcluster.core.ids import Epoch, ShardId
from kvcluster.core.messages import RefusedKind, ShardAddress
from kvcluster.core.miss import PURGING, Miss, MissReason
from kvcluster.errors import CallerError, LimitError
from kvcluster.transfers.breaker import LEAST_WAIT_NS
from kvcluster.transfers.shard_health import AskAgain, Permit, ShardHealth
from kvcluster.transport.base import Cancelled, Unavailable
from tests.client.stepping import BREAKER_NS, GIVEN_UP, LATE, LOST, A, B, policy, refused

NEWER = ShardAddress(A.shard, Epoch(2), "elsewhere")
RESTARTED = Miss(MissReason.SHARD_LOST, "a has restarted")


def permit(shards: ShardHealth, shard: ShardAddress = A, now: int = 0) -> Permit:
    permit = shards.permit(shard, now)
    assert isinstance(permit, Permit), permit
    return permit


def state(shards: ShardHealth, shard: str = "a", now: int = 0) -> tuple[object, object, object]:
    breaker = shards.status(now)[shard]
    return breaker["state"], breaker["failures"], breaker["open_ms"]


def fail(shards: ShardHealth, shard: ShardAddress = A, now: int = 0) -> None:
    shards.failed(permit(shards, shard, now), LOST, now)


# --------------------------------------------------------------------------------------------- permits


def test_each_shard_has_a_breaker_of_its_own() -> None:
    shards = policy(failures=1)
    fail(shards)
    permit(shards, B)
    assert state(shards) == ("open", 1, 1) and state(shards, "b") == ("closed", 0, 0)


def test_what_is_not_permitted_is_a_miss_that_names_the_shard() -> None:
    shards = policy(failures=1)
    fail(shards)
    assert shards.permit(A, 0) == Miss(MissReason.SHARD_LOST, "a not asked: failed 1 times, next attempt in 0.0 s")


def test_after_its_time_one_exchange_is_permitted_and_decides() -> None:
    shards = policy(failures=1)
    fail(shards)
    assert isinstance(shards.permit(A, BREAKER_NS - 1), Miss)
    probe = permit(shards, now=BREAKER_NS)
    assert isinstance(shards.permit(A, BREAKER_NS), Miss)
    shards.answered(probe)
    assert shards.serves(A)


def test_a_probe_that_fails_keeps_it_open_for_longer() -> None:
    shards = policy(failures=1)
    fail(shards)
    fail(shards, now=BREAKER_NS)
    assert state(shards, now=BREAKER_NS) == ("open", 2, 2)


# ------------------------------------------------------------------------------------------ incarnations


def test_a_newer_incarnation_begins_afresh() -> None:
    shards = policy(failures=1)
    fail(shards)
    permit(shards, NEWER)
    assert state(shards) == ("closed", 0, 0)


def test_the_incarnation_of_the_lower_epoch_is_asked_too_and_changes_nothing_of_the_other() -> None:
    """It may be an old ticket's, or the newest, on a node whose clock is behind."""
    shards = policy(failures=1)
    permit(shards, NEWER)
    fail(shards)
    assert state(shards) == ("open", 1, 1)
    assert shards.serves(NEWER) and not shards.serves(A)
    permit(shards, NEWER)
    assert state(shards) == ("closed", 0, 0)


def test_the_breakers_of_two_incarnations_are_kept() -> None:
    shards = policy(failures=1)
    fail(shards)
    for epoch in range(2, 100):
        fail(shards, ShardAddress(A.shard, Epoch(epoch), "elsewhere"))
        assert isinstance(shards.permit(ShardAddress(A.shard, Epoch(epoch), "elsewhere"), 0), Miss)
    permit(shards)


def test_what_ends_of_an_older_incarnation_says_nothing_of_the_newer() -> None:
    shards = policy(failures=1)
    old = [permit(shards) for _ in range(3)]
    permit(shards, NEWER)
    shards.failed(old[0], LOST, 0)
    shards.gave_up(old[1])
    shards.answered(old[2])
    assert state(shards) == ("closed", 0, 0)
    fail(shards, NEWER)
    shards.answered(old[0])
    assert state(shards) == ("open", 1, 1)


def test_an_incarnation_that_moved_to_another_address_begins_afresh() -> None:
    shards = policy(failures=1)
    fail(shards)
    permit(shards, ShardAddress(A.shard, A.epoch, "elsewhere"))
    assert state(shards) == ("closed", 0, 0)


def test_only_a_shard_that_was_asked_and_whose_breaker_is_closed_serves() -> None:
    shards = policy(failures=1)
    assert not shards.serves(A)
    permit(shards)
    assert shards.serves(A)
    fail(shards)
    assert not shards.serves(A)
    permit(shards, now=BREAKER_NS)
    assert not shards.serves(A), "it is on probation"


# --------------------------------------------------------------------------------------------- endings


def ended(error: BaseException | None, *, reattached: bool = False) -> tuple[object, int]:
    """Returns the verdict on that end of an exchange, and the failures of its shard afterwards. It had one."""
    shards = policy()
    fail(shards)
    verdict = shards.ended(permit(shards), error, 0, reattached=reattached)
    return verdict, int(str(state(shards)[1]))


def test_an_answer_shows_that_the_shard_lives() -> None:
    assert ended(None) == (None, 0)


@pytest.mark.parametrize("miss", [LOST, LATE])
def test_trouble_is_its_miss_and_a_failure(miss: Miss) -> None:
    assert ended(Unavailable(miss)) == (miss, 2)


@pytest.mark.parametrize(("waited_ns", "failures"), [(LEAST_WAIT_NS, 1), (LEAST_WAIT_NS - 1, 0)])
def test_an_answer_that_comes_too_late_is_a_failure_if_the_call_had_time(waited_ns: int, failures: int) -> None:
    shards = policy()
    assert shards.ended(permit(shards, now=7), Unavailable(LATE), 7 + waited_ns) == LATE
    assert state(shards)[1] == failures
    fail(shards)
    assert state(shards)[1] == failures + 1, "what is not answered at all is one whatever it took"


def test_a_store_that_a_purge_stopped_says_that_the_shard_lives() -> None:
    """However many were under way: purges open no breaker."""
    stopped = Miss(PURGING.reason, f"shard-0: {PURGING.detail}")
    assert ended(Unavailable(stopped)) == (stopped, 0)


def test_what_was_cancelled_is_its_miss_and_says_nothing_of_the_shard() -> None:
    assert ended(Cancelled(GIVEN_UP)) == (GIVEN_UP, 1)


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt(), CallerError("no")])
def test_any_other_error_is_the_callers_and_says_nothing_of_the_shard(error: BaseException) -> None:
    assert ended(error) == (error, 1)


def test_a_forgotten_namespace_is_named_once_more_and_shows_that_the_shard_lives() -> None:
    verdict, failures = ended(refused(RefusedKind.UNKNOWN_NAMESPACE))
    assert verdict == AskAgain(reattached=True) and failures == 0


def test_a_namespace_that_was_named_once_more_and_forgotten_again_is_a_miss() -> None:
    verdict, failures = ended(refused(RefusedKind.UNKNOWN_NAMESPACE), reattached=True)
    assert verdict == Miss(MissReason.SHARD_LOST, "a forgets the namespace: in these words") and failures == 0


@pytest.mark.parametrize("reattached", [False, True])
def test_an_epoch_that_is_over_is_a_miss(reattached: bool) -> None:
    assert ended(refused(RefusedKind.STALE), reattached=reattached) == (RESTARTED, 0)


@pytest.mark.parametrize(("kind", "error"), [(RefusedKind.LIMIT, LimitError), (RefusedKind.BAD, CallerError)])
def test_a_mistake_that_a_shard_sees_is_the_callers_in_its_words(kind: RefusedKind, error: type[Exception]) -> None:
    verdict, failures = ended(refused(kind))
    assert type(verdict) is error and str(verdict) == "in these words" and failures == 0


def test_a_probe_that_is_given_up_is_made_by_the_next() -> None:
    shards = policy(failures=1)
    fail(shards)
    assert shards.ended(permit(shards, now=BREAKER_NS), Cancelled(GIVEN_UP), BREAKER_NS) == GIVEN_UP
    permit(shards, now=BREAKER_NS)


def test_the_status_is_of_all_shards_that_were_asked() -> None:
    shards = policy(failures=1)
    assert shards.status(0) == {}
    permit(shards, ShardAddress(ShardId("s"), Epoch(1), ""))
    assert shards.status(0) == {"s": {"state": "closed", "failures": 0, "open_ms": 0}}
