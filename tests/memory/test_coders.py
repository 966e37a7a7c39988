"""This process's implementation of the codecs makes the bytes of the definition for pages of all kinds."""

from __future__ import annotations

import pytest

from kvcluster.memory import codec
from tests.memory.coders import comparisons


@pytest.mark.slow
def test_pages_of_all_kinds_are_encoded_and_decoded_as_the_definition_does() -> None:
    compared = {what: compare() for what, compare in comparisons(str(codec.implementation()), "cpu")}
    assert len(compared) == 270
    assert not {what: wrong for what, wrong in compared.items() if wrong is not None}
