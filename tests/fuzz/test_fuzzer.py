"""The fuzzer finds each way to break a contract, planted in a small parser, and reports it so that it can be
repeated."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

import pytest

from kvcluster.errors import ProtocolError
from tests.fuzz.__main__ import main
from tests.fuzz.contract import Parser, trees
from tests.fuzz.fuzzer import Finding, Fuzz, shrunk, spelt, unspelt
from tests.fuzz.mutator import Mutator
from tests.fuzz.trees import Kind, Node, Tree, fields, message, varint, words

INPUTS = 5_000
INNER = b"\x08\x05\x12\x03abc"
VALID = b"\x0a" + varint(len(INNER)) + INNER + b"\x10\x07"
"""A message in a message: field 1 holds a number and text, field 2 a number."""


def read(data: bytes) -> tuple[int, bytes, int]:
    """A parser without a fault, of messages like VALID with numbers of one byte."""
    if len(data) < 8 or data[0] != 0x0A or data[1] != len(data) - 4 or data[-2] != 0x10 or max(data) > 0x7F:
        raise ProtocolError("not this message")
    inner = data[2:-2]
    if inner[0] != 0x08 or inner[2] != 0x12 or inner[3] != len(inner) - 4:
        raise ProtocolError("not this message within")
    return inner[1], inner[4:], data[-1]


def write(value: tuple[int, bytes, int]) -> bytes:
    number, text, last = value
    inner = bytes([0x08, number, 0x12, len(text)]) + text
    return b"\x0a" + varint(len(inner)) + inner + bytes([0x10, last])


def parser(reader: Callable[[bytes], object] = read, *, writer: Callable[..., bytes] | None = write) -> Parser:
    return Parser("planted", reader, lambda: trees([VALID], message), (ProtocolError,), writer)


def found(reader: Callable[[bytes], object], *, writer: Callable[..., bytes] | None = write) -> str:
    with pytest.raises(Finding) as finding:
        Fuzz(parser(reader, writer=writer), seed=1).run(INPUTS)
    return str(finding.value)


def test_a_sound_parser_passes() -> None:
    tally = Fuzz(parser(), seed=1).run(INPUTS)
    assert tally.inputs == INPUTS == tally.accepted + tally.refused
    assert tally.accepted > INPUTS // 10


def test_an_undocumented_error_deep_within_is_found_shrunk_and_repeats() -> None:
    def reader(data: bytes) -> object:
        value = read(data)
        if value[0] == 64:
            raise KeyError("a number of sixty-four")
        return value

    told = found(reader)
    assert "KeyError" in told
    data = unspelt(re.search(r"--input (\S+)", told)[1])  # type: ignore[index]
    assert len(data) <= len(VALID)
    with pytest.raises(Finding, match="KeyError"):
        Fuzz(parser(reader), seed=2).check(data)


def test_a_value_of_another_type_is_found() -> None:
    assert "returned list" in found(lambda data: list(read(data)) if read(data)[2] == 100 else read(data))


def test_a_value_that_does_not_come_back_is_found() -> None:
    assert "read again" in found(read, writer=lambda value: write((5, *value[1:])))


def test_a_value_that_cannot_be_written_is_found() -> None:
    assert "cannot be written" in found(
        read, writer=lambda value: write((value[0], value[1].decode("ascii"), value[2]))
    )


def test_a_length_that_is_believed_is_found() -> None:
    def reader(data: bytes) -> object:
        bytearray(int.from_bytes(data[:2], "little") * 256)
        return read(data)

    assert "bytes of memory" in found(reader)


def test_work_out_of_proportion_is_found() -> None:
    def reader(data: bytes) -> object:
        value = read(data)
        for number in range(value[0] * 10_000):
            assert number >= 0
        return value

    assert "lines run" in found(reader)


def test_what_is_left_behind_is_found() -> None:
    kept: list[bytes] = []

    def reader(data: bytes) -> object:
        kept.append(data[:-1])
        return read(data)

    assert "objects" in found(reader)


def test_an_input_that_hangs_is_told_when_the_test_is_ended() -> None:
    class Ended(BaseException):
        """What a timeout raises."""

    def reader(data: bytes) -> object:
        if data != VALID:
            raise Ended
        return read(data)

    assert "--input" in found(reader)


def test_the_same_seed_makes_the_same_inputs() -> None:
    made = [
        [Mutator([Tree(message(VALID))], [b"word"]).make(rng) for _ in range(200)]
        for rng in (Random("1"), Random("1"), Random("2"))
    ]
    assert made[0] == made[1] != made[2]


def test_a_tree_is_the_input_that_it_was_made_of() -> None:
    for root in (
        message(VALID),
        message(b"\xff" * 9),
        words(VALID),
        Node(Kind.MANY, children=fields(VALID, (1, 2, 4))),
    ):
        assert Tree(root).whole in (VALID, b"\xff" * 9, VALID[:7])
        for path in Tree(root).paths:
            assert Tree.with_piece(path, path[0].whole) == Tree(root).whole


def test_lengths_around_a_change_stay_true() -> None:
    text = next(path for path in Tree(message(VALID)).paths if path[0].body == b"abc")
    assert read(Tree.with_piece(text, text[0].around(b"changed"))) == (5, b"changed", 7)


def test_shrinking_leaves_what_it_takes() -> None:
    assert shrunk(bytes(1_000) + b"x" + bytes(777) + b"y", lambda data: b"x" in data and b"y" in data) == b"xy"


@pytest.mark.parametrize("data", [b"", b"\x00\xff", bytes(5_000)])
def test_an_input_on_a_command_line_is_the_same(data: bytes) -> None:
    assert unspelt(spelt(data)) == data
    assert len(spelt(data)) < 500


def test_the_command_line_repeats_an_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for data, said in ((b"1GiB", "accepted"), (b"1 pound", "refused")):
        monkeypatch.setattr("sys.argv", ["fuzz", "--parser", "size", "--input", spelt(data)])
        assert main() == 0
        assert f"size: {said}" in capsys.readouterr().out


def test_the_command_line_ends_in_an_error_where_a_parser_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = parser(lambda data: read(data) if data == VALID else 1 / 0)
    monkeypatch.setattr("tests.fuzz.__main__.PARSERS", {"planted": broken})
    monkeypatch.setattr("sys.argv", ["fuzz", "--inputs", "100"])
    assert main() == 1
    assert "ZeroDivisionError" in capsys.readouterr().out
