"""What actors log reaches standard output, and their files give back what has been passed on."""

from __future__ import annotations

import random
from pathlib import Path

from kvcluster.runtime import kept_logs, log_follower
from kvcluster.runtime.log_follower import KEPT_BYTES, LogFollower


class Followed:
    """A folder of logs that is followed."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._passed = folder, bytearray()
        self._follower = LogFollower(folder, self._passed.extend)

    def path(self, name: str) -> Path:
        return self._folder / f"worker-{name}.err"

    def write(self, name: str, data: bytes) -> None:
        with self.path(name).open("ab") as file:
            file.write(data)

    def look(self) -> bytes:
        self._passed.clear()
        self._follower.look()
        return bytes(self._passed)


def test_whole_lines_are_passed_on_once_and_marks_are_not(tmp_path: Path) -> None:
    logs = Followed(tmp_path)
    logs.write("a", b":actor_name:ShardActor\n:kvcluster:shard-0\none\ntw")
    assert logs.look() == b"one\n"
    logs.write("a", b"o\nthree")
    logs.write("b", b"other\n")
    assert logs.look() == b"two\nother\n"
    assert logs.look() == b""


def test_lines_drawn_and_cut_anywhere_arrive_in_their_order(tmp_path: Path) -> None:
    logs, draw = Followed(tmp_path), random.Random(7)
    text = b"".join(
        b"%d " % at + draw.randbytes(draw.randrange(200)).replace(b"\n", b"") + b"\n" for at in range(2_000)
    )
    at, passed = 0, b""
    while at < len(text):
        size = draw.randrange(1, 5_000)
        logs.write("a", text[at : at + size])
        at += size
        passed += logs.look()
    assert passed == text


def test_a_line_without_an_end_is_passed_on_in_pieces(tmp_path: Path) -> None:
    logs = Followed(tmp_path)
    logs.write("a", b"x" * 200_000)
    assert logs.look().replace(b"\n", b"") == b"x" * 200_000


def test_a_file_gives_back_what_was_passed_on_and_keeps_its_name_and_its_end(tmp_path: Path) -> None:
    logs = Followed(tmp_path)
    logs.write("a", b":kvcluster:shard-0\n")
    line = b"x" * 99 + b"\n"
    for _ in range(8):
        logs.write("a", line * 50_000)
        assert len(logs.look()) == 50_000 * len(line)
    found = logs.path("a").stat()
    assert found.st_size > 35 * 2**20
    assert found.st_blocks * 512 < KEPT_BYTES + log_follower.HOLE_BYTES + 2 * 2**20
    (log,) = [log for log in kept_logs.logs_of(tmp_path) if log.path.name == "worker-a.err"]
    assert log.process == "shard-0"
    lines = kept_logs.last_lines(log.path, 10_000)
    assert lines == [line.decode().strip()] * 10_000


def test_a_writer_that_goes_on_loses_nothing(tmp_path: Path) -> None:
    logs = Followed(tmp_path)
    with logs.path("a").open("ab", buffering=0) as writer:
        for number in range(300):
            writer.write(b"%d " % number + b"y" * 99_990 + b"\n")
            (line,) = logs.look().splitlines()
            assert line.startswith(b"%d y" % number)


def test_a_folder_that_is_not_there_yet_has_no_logs(tmp_path: Path) -> None:
    assert Followed(tmp_path / "later").look() == b""
