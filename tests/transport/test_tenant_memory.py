"""Shares of memory: what one tenant holds leaves room for another, and no wait lasts longer than it may."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvcluster.core import limits
from kvcluster.core.ids import Tenant
from kvcluster.core.miss import MissReason
from kvcluster.testing.conformance.world import BOUND_S, soon
from kvcluster.transport.base import Deadline, Unavailable
from kvcluster.transport.tenant_memory import UNCHARGED, Account, TenantMemory
from tests.waiting import eventually

A, B = Tenant("a"), Tenant("b")


def test_a_tenant_that_holds_its_share_leaves_room_for_another() -> None:
    memory = TenantMemory(100)
    assert memory.try_take(A, 50) and not memory.try_take(A, 1)
    assert memory.try_take(B, 25) and not memory.try_take(B, 1)
    memory.give_back(A, 50)
    assert memory.total == 25


def test_a_wait_ends_with_room_at_its_deadline_or_with_the_listener() -> None:
    memory = TenantMemory(100)
    memory.take(A, 50, soon())
    with pytest.raises(Unavailable) as late:
        memory.take(A, 1, Deadline.after_ms(20))
    assert late.value.miss.reason is MissReason.DEADLINE
    with ThreadPoolExecutor(1) as aside:
        waiting = aside.submit(memory.take, A, 30, soon())
        memory.give_back(A, 50)
        waiting.result(BOUND_S)
        ending = aside.submit(memory.take, A, 30, soon())
        assert eventually(lambda: bool(memory._freed._waiters))  # type: ignore[attr-defined]
        memory.close()
        with pytest.raises(Unavailable) as ended:
            ending.result(BOUND_S)
    assert ended.value.miss.reason is MissReason.SHARD_LOST
    assert memory.total == 30


def test_small_amounts_are_free_and_an_account_releases_all_that_it_holds() -> None:
    memory = TenantMemory(16 * limits.SMALL_BODY_BYTES)
    account = Account(memory, A, 1e6)
    account.take(limits.SMALL_BODY_BYTES, soon())
    assert account.try_take(limits.SMALL_BODY_BYTES) and memory.total == 0
    account.take(2 * limits.SMALL_BODY_BYTES, soon())
    assert account.try_take(3 * limits.SMALL_BODY_BYTES) and not account.try_take(9 * limits.SMALL_BODY_BYTES)
    assert memory.total == account.held == 5 * limits.SMALL_BODY_BYTES
    account.release()
    assert memory.total == account.held == 0
    UNCHARGED.take(2**60, soon())
    assert UNCHARGED.try_take(2**60) and not UNCHARGED.held
