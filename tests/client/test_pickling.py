"""Values go to other processes as they are; what belongs to its process says what to pass instead."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest

import kvcluster
from kvcluster.errors import CallerError, LostTokens
from tests.client.build import SPEC, kv, prompt, room


@pytest.fixture
def client() -> Iterator[kvcluster.Client]:
    with kvcluster.local(ray=False, ram_bytes="4MiB") as cluster:
        yield cluster.client(SPEC)


def test_values_are_pickled(client: kvcluster.Client) -> None:
    asked = kvcluster.Prompt(prompt(2), salt=b"s", extra_keys={0: b"image"})
    stored = client.store(asked, kv(2))
    client.flush()
    values = [
        asked,
        SPEC,
        stored,
        client.lookup(asked),
        *client.explain(asked),
        kvcluster.Miss(kvcluster.MissReason.OFF),
    ]
    assert [pickle.loads(pickle.dumps(value)) for value in values] == values
    lost = pickle.loads(pickle.dumps(LostTokens(7, "lost")))
    assert isinstance(lost, LostTokens) and (lost.position, str(lost)) == (7, "lost")


def test_what_belongs_to_its_process_says_what_to_pass_instead(client: kvcluster.Client) -> None:
    client.store(prompt(2), kv(2))
    client.flush()
    with client.prepare_load(client.hashes(prompt(2))) as ticket, client.sequence() as sequence:
        transfer = client.begin_load(ticket, room(2))
        transfer.result()
        with client.borrow(ticket) as blocks:
            for held, instead in (
                (client, "connect in the other process"),
                (sequence, "connect in the other process"),
                (kvcluster.SequenceBatch([sequence]), "connect in the other process"),
                (ticket, r"pass bytes\(ticket\), and redeem that there"),
                (transfer, "use it where it was begun"),
                (blocks, r"pass bytes\(ticket\), and borrow there"),
            ):
                for use in (pickle.dumps, copy.copy, copy.deepcopy):
                    with pytest.raises(CallerError, match=f"a {type(held).__name__} belongs to its process.*{instead}"):
                        use(held)


def test_a_client_shows_where_its_cluster_is(client: kvcluster.Client) -> None:
    assert repr(client).startswith("<Client of tiny at in-process://")
