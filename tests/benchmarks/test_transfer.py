"""`python -m benchmarks transfer`: all paths run and are compared; one that fails is left out or ends the run, with a
reason."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.specs import BY_PAGE_BYTES
from benchmarks.transfer import baselines, end_to_end, interleave, table, thresholds
from benchmarks.transfer.interleave import FLOOR, PEER, TRANSPORT, WHOLE, BenchDriver, TransferPlan
from benchmarks.transfer.layout import LAYOUTS
from benchmarks.transfer.measuring import paths_of, peer_drivers, wanted_peers
from benchmarks.transfer.processes import OWN_PYTHON, cpu_ns, peer_command
from benchmarks.transfer.thresholds import KIB64, MIB2, verdicts
from kvcluster.cli.child_process import ChildError, ChildProcess
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
OURS = ("shm", "tcp", "grpc")
ALL_LAYOUTS = (*LAYOUTS, "dense")
PEERS = ("redis", "lmcache", "lmcache_shm", "mooncake", "nixl")
HIDE = "import sys; sys.modules[{0!r}] = None; from benchmarks.__main__ import main; sys.exit(main(sys.argv[1:]))"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m benchmarks transfer ARGUMENTS`, as small as it can be."""
    small = ["--rounds", "1", "--moved", "1MiB", "--pages", "64KiB"]
    command = [sys.executable, "-m", "benchmarks", "transfer", *small, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


# ------------------------------------------------------------------------------------------ from end to end


@pytest.mark.cluster
@pytest.mark.nightly
def test_every_path_loads_and_stores_what_is_compared(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    no_peers = tmp_path / "no_peers"
    no_peers.mkdir()
    done = bench("--json", "--clients", "2", "1", "--peers", str(no_peers), "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["setting"].keys() >= {"python", "machine", "cores"}
    assert (figures["rounds"], figures["moved_bytes"], figures["left_out"]) == (1, 2**20, {})
    expected = [(path, "dense") for path in (*baselines.PATHS, *OURS)]
    expected += [(f"client {name}", layout) for name in OURS for layout in ("nhd", "dense")]
    assert [(row["clients"], row["path"], row["layout"], row["operation"]) for row in figures["paths"]] == [
        (clients, *moved, operation) for clients in (1, 2) for moved in expected for operation in ("load", "store")
    ]
    assert {row["tokens_per_s"] for row in figures["paths"]} == {None}, "64 KiB are only a part of a model's KV"
    assert {row["page_bytes"] for row in figures["paths"]} == {KIB64}
    assert all(
        row[name] > 0 for row in figures["paths"] for name in ("ms", "gb_per_s", "gb_per_cpu_s", *interleave.RATIOS)
    )
    assert [row["path"] for row in figures["latencies"]] == ["raw TCP x1", *OURS]
    assert all(0 < row["p50_ms"] <= row["p99_ms"] for row in figures["latencies"])
    judged = {verdict["goal"]: verdict["met"] for verdict in figures["verdicts"]}
    assert judged["client shm load, 64 KiB, nhd: of memcpy"] is not None
    assert judged["tcp load, 2 MiB: of raw TCP with two streams"] is None, "2 MiB was not measured"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--paths", "carrier-pigeon"], "there is no path 'carrier-pigeon'; there is shm, tcp, grpc, lmcache, "),
        (["--layouts", "upside-down"], "there is no layout 'upside-down'; there is nhd, hnd, cpu, transformers, dense"),
        (
            ["--pages", "1KiB"],
            "--pages 1KiB: only 64KiB, 2MiB, 16MiB and pages of llama-3-8b, llama-3-70b, deepseek-v3 ",
        ),
        (["--moved", "much"], "--moved: 'much' is no size"),
        (["--plot", "no/such/folder/picture.png"], "cannot draw into no/such/folder/picture.png"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_starts(
    arguments: Sequence[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["transfer", *arguments]) == 1
    assert capsys.readouterr().err.startswith(f"benchmarks: {sentence}")


def test_a_path_is_asked_for_by_the_name_that_tables_and_the_page_of_peers_give_it() -> None:
    """Its cell in the table of what to install, and every name that a driver prints, is a name that --paths takes."""
    printed = {peer: paths_of(ROOT / "benchmarks" / f"{peer}_driver.py") for peer in PEERS}
    assert all(printed.values())
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8").split("## Install")[1]
    cells = [line.split("|")[2] for line in page.split("InfiniStore")[0].splitlines() if line.count("|") > 3][2:]
    assert sorted(re.findall("`(.+?)`", " ".join(cells))) == sorted(path for its in printed.values() for path in its)
    for peer, its in printed.items():
        for path in its:
            assert wanted_peers([path], printed) == {peer: [] if path == peer else [path]}
    assert wanted_peers(["shm"], printed) == {}
    assert wanted_peers(["nixl"], printed) == {"nixl": []}
    assert wanted_peers([], printed) == {peer: [] for peer in PEERS}


def test_a_picture_without_matplotlib_says_what_to_install() -> None:
    command = [sys.executable, "-c", HIDE.format("matplotlib"), "transfer", "--plot", "picture.png"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("benchmarks: this needs matplotlib")
    assert done.stderr.endswith("which is not installed: pip install 'kvcluster[bench]'\n")


# ----------------------------------------------------------------------------------- drivers that misbehave

DRIVER = """
import os
from contextlib import contextmanager

import worker

WAYS = ("honest", "brings nothing", "brings a wrong byte", "refuses", "dies")
PATHS = {way: {"over": "memory", "note": "a test"} for way in WAYS}

@contextmanager
def serve(paths, work):
    print("a library that prints")
    yield {"at": {"paths": paths}}

def connect(path, work, at):
    assert path in at["paths"]
    return Store(path, work)

class Store(worker.Path):
    def __init__(self, way, work):
        self.way, self.work, self.batches = way, work, {}

    def store(self, batch):
        print("a library that prints")
        if self.way == "refuses" and batch:
            raise OSError("no room")
        if self.way == "dies" and batch:
            print("out of memory")
            os._exit(3)
        self.batches[batch] = bytes(self.work.source)

    def load(self, batch):
        if self.way != "brings nothing":
            self.work.into[:] = self.batches[batch]
        if self.way == "brings a wrong byte" and batch:
            self.work.into[-1] ^= 1

    def forget(self, batch):
        del self.batches[batch]
"""


@pytest.fixture
def driver(tmp_path: Path) -> str:
    file = tmp_path / "fake_driver.py"
    file.write_text(DRIVER, encoding="utf-8")
    return str(file)


def run(
    *drivers: BenchDriver, clients: Sequence[int] = (1,), layouts: Sequence[str] = ("dense",), page_bytes: int = KIB64
) -> interleave.Figures:
    """One small page size, these drivers beside the floors."""
    floors = BenchDriver(baselines.__name__, FLOOR, baselines.PATHS)
    return interleave.run(TransferPlan([floors, *drivers], layouts, [page_bytes], clients, 1, 2**18, 20))


def peer(file: str, path: str, *, level: str = PEER, rests: bool = False) -> BenchDriver:
    """One path of a peer's driver file, run by this Python."""
    return BenchDriver(file, level, {path: {"over": "memory", "note": "a test"}}, peer_command(sys.executable), rests)


def test_a_peer_that_fails_is_left_out_with_its_own_words_and_the_others_are_measured(driver: str) -> None:
    figures = run(*peer_drivers(Path(driver), sys.executable), clients=(1, 2))
    assert figures.left_out == {
        "brings nothing": "OSError: what was loaded is not what was stored",
        "brings a wrong byte": "OSError: what was loaded is not what was stored",
        "refuses": "OSError: no room",
        "dies": "the process has ended: out of memory",
    }
    rows = [(row["path"], row["clients"], row["operation"]) for row in figures.paths if row["level"] == PEER]
    assert rows == [("honest", clients, operation) for clients in (1, 2) for operation in ("load", "store")]


def test_a_peer_that_would_work_while_it_waits_is_stopped_between_its_rounds(driver: str) -> None:
    figures = run(peer(driver, "honest", rests=True))
    assert (figures.left_out, "honest" in {row["path"] for row in figures.paths}) == ({}, True)
    with ChildProcess(OWN_PYTHON) as client:
        client.ask("purge")
        client.stop()
        eventually(lambda: _state(client.pid) == "T")
        client.resume()
        assert client.ask("describe", driver=baselines.__name__) == {"paths": baselines.PATHS, "rests": False}


def test_a_peer_is_measured_in_every_layout_with_its_scatter_and_floors_are_dense(driver: str) -> None:
    figures = run(peer(driver, "honest"), layouts=ALL_LAYOUTS)
    assert figures.left_out == {}
    rows = [(row["layout"], row["operation"]) for row in figures.paths if row["level"] == PEER]
    assert rows == [(layout, operation) for layout in ALL_LAYOUTS for operation in ("load", "store")]
    assert {row["layout"] for row in figures.paths if row["level"] == FLOOR} == {"dense"}


def test_latent_kv_is_measured_only_in_layouts_that_engines_keep_it_in_and_in_tokens(driver: str) -> None:
    (latent,) = [nbytes for nbytes, spec in BY_PAGE_BYTES.items() if spec.model == "deepseek-v3"]
    figures = run(peer(driver, "honest"), layouts=ALL_LAYOUTS, page_bytes=latent)
    rows = [row for row in figures.paths if row["level"] == PEER]
    assert {row["layout"] for row in rows} == {"nhd", "hnd", "dense"}
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(row["gb_per_s"] * 1e9 / 70_272)


@pytest.mark.parametrize(
    ("way", "layout"), [("brings nothing", "nhd"), *(("brings a wrong byte", layout) for layout in LAYOUTS)]
)
def test_wrong_bytes_are_noticed_in_every_layout(driver: str, way: str, layout: str) -> None:
    figures = run(peer(driver, way), layouts=(layout,))
    assert figures.left_out == {way: "OSError: what was loaded is not what was stored"}


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]


@pytest.mark.parametrize("way", ["brings nothing", "brings a wrong byte", "refuses", "dies"])
def test_a_path_of_our_own_that_fails_ends_the_run(driver: str, way: str) -> None:
    with pytest.raises(ChildError, match=way):
        run(peer(driver, way, level=TRANSPORT))


def test_a_ratio_is_to_the_floor_with_as_many_clients_doing_the_same(driver: str) -> None:
    figures = run(peer(driver, "honest"), clients=(1, 2))
    rates = {(row["path"], row["clients"], row["operation"]): row["gb_per_s"] for row in figures.paths}
    for row in figures.paths:
        for ratio, floor in interleave.RATIOS.items():
            base = rates[floor, row["clients"], row["operation"]]
            assert row[ratio] == pytest.approx(row["gb_per_s"] / base)


@pytest.mark.parametrize("name", PEERS)
def test_every_driver_of_a_peer_says_what_it_offers_or_what_is_missing(name: str) -> None:
    try:
        drivers = peer_drivers(ROOT / "benchmarks" / f"{name}_driver.py", sys.executable)
    except ChildError as error:
        assert "No module named" in str(error) or "no redis-server" in str(error)
    else:
        assert all(path.startswith(name.partition("_")[0]) for driver in drivers for path in driver.paths)
        assert all(
            {"over", "note"} <= about.keys() <= {"over", "note", "into"}
            for driver in drivers
            for about in driver.paths.values()
        )


def test_a_driver_that_cannot_be_read_is_missing_and_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken_driver.py"
    broken.write_text("import a_package_that_is_not_installed\n", encoding="utf-8")
    with pytest.raises(ChildError, match="a_package_that_is_not_installed"):
        peer_drivers(broken, sys.executable)
    with pytest.raises(ChildError, match=r"cannot run .*no-python"):
        peer_drivers(broken, str(tmp_path / "no-python"))


def test_the_clock_of_a_process_is_its_cpu_time() -> None:
    before = time.process_time_ns()
    measured = cpu_ns(os.getpid())
    assert before <= measured <= time.process_time_ns()


def test_a_process_that_has_gone_takes_no_more_time() -> None:
    lives = "import time\nwhile not time.process_time_ns(): pass\nprint(time.process_time_ns(), flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", lives], stdin=pipe, stdout=pipe) as child:
        assert child.stdout
        assert 0 < int(child.stdout.readline()) <= cpu_ns(child.pid)
        child.communicate(b"\n")
    assert cpu_ns(child.pid) == 0


# -------------------------------------------------------------------------------------------------- verdicts


def row(path: str, gb_per_s: float, *, page_bytes: int = MIB2, operation: str = "load", **more: Any) -> dict[str, Any]:
    base = {
        "clients": 1,
        "level": TRANSPORT,
        "layout": "dense",
        "ms": 10.0,
        "tokens_per_s": None,
        "over": "memory",
        "gb_per_cpu_s": None,
        "note": "a test",
    }
    ratios = {"of_memcpy": 0.5, "of_checked_copy": 0.8, "of_raw_tcp_1": 1.5, "of_raw_tcp_2": 0.9}
    return {
        **base,
        **ratios,
        "path": path,
        "gb_per_s": gb_per_s,
        "page_bytes": page_bytes,
        "operation": operation,
        **more,
    }


def judged(paths: Sequence[dict[str, Any]], latencies: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {verdict["goal"]: (verdict["figure"], verdict["met"]) for verdict in verdicts(paths, latencies)}


def test_a_goal_is_met_from_its_bound_on() -> None:
    verdict = judged([row("tcp", 2.0, of_raw_tcp_2=0.9), row("tcp", 2.0, of_raw_tcp_2=0.8999, operation="store")])
    assert verdict["tcp load, 2 MiB: of raw TCP with two streams"] == (0.9, True)
    assert verdict["tcp store, 2 MiB: of raw TCP with two streams"] == (0.8999, False)


def test_a_goal_without_its_figure_is_open() -> None:
    assert set(judged([]).values()) == {(None, None)}
    other_size = judged([row("shm", 2.0, page_bytes=16 * 2**20)])
    assert other_size["shm load, 2 MiB: of memcpy and one checksum pass"] == (None, None)


def test_goals_are_about_one_client() -> None:
    two = [row("client shm", 9.0, layout="nhd", clients=2), row("redis tcp", 1.0, layout="nhd", clients=4, level=PEER)]
    assert set(judged(two).values()) == {(None, None)}


def test_a_goal_for_any_layout_is_judged_by_the_slowest_of_the_engines() -> None:
    rows = [
        row("client shm", 5.0, layout=layout, of_memcpy=ratio)
        for layout, ratio in (("nhd", 0.75), ("cpu", 0.7), ("hnd", 0.8), ("dense", 0.1))
    ]
    assert judged(rows)["client shm load, 2 MiB, any layout (slowest: cpu): of memcpy"] == (0.7, True)
    only_dense = judged(rows[-1:])
    assert only_dense["client shm load, 2 MiB, any layout: of memcpy"] == (None, None), "no engine is dense"


def test_whole_loads_are_beside_the_best_peers_load_and_scatter() -> None:
    def nhd(path: str, gb_per_s: float, **more: Any) -> dict[str, Any]:
        return row(path, gb_per_s, layout="nhd", **more)

    peers = [
        nhd("nixl ucx", 2.0, level=PEER),
        nhd("redis tcp", 1.0, level=PEER, over="tcp"),
        nhd("lmcache shm", 4.0, level=PEER),
        row("redis unix", 50.0, level=PEER),  # contiguous: it has not scattered
    ]
    verdict = judged([nhd("client shm", 6.0), nhd("client tcp", 1.4), *peers])
    assert verdict["client tcp load, 2 MiB, nhd: times the best peer over TCP (redis tcp)"] == (1.4, False)
    assert verdict["client shm load, 2 MiB, nhd: times the best peer that crosses a process (nixl ucx)"] == (3.0, True)
    assert verdict["client shm load, 2 MiB, nhd: times LMCache's shared memory (lmcache shm)"] == (1.5, True)


def test_times_of_single_pages_are_bounded_by_themselves_or_by_a_raw_round_trip() -> None:
    taken = [("shm", MIB2, 0.26), ("tcp", MIB2, 2.5), ("raw TCP x1", MIB2, 2.0)]
    latencies = [{"path": path, "page_bytes": size, "p50_ms": p50} for path, size, p50 in taken]
    verdict = judged([], latencies)
    assert verdict["shm, one page of 2 MiB: median, ms"] == (0.26, False)
    assert verdict["tcp, one page of 2 MiB: median, times a raw socket's round trip"] == (1.25, True)


def test_the_table_shows_every_row_note_and_verdict() -> None:
    rows = [
        row("memcpy", 9.0, level=FLOOR),
        row("shm", 7.0, operation="store", of_memcpy=0.2, clients=2, gb_per_cpu_s=1.25),
        row("client shm", 6.0, level=WHOLE, layout="hnd", tokens_per_s=45_776.4),
        row("redis unix", 1.0, level=PEER, layout="hnd", tokens_per_s=7_629.4, over="unix"),
    ]
    latencies = [{"page_bytes": MIB2, "path": "shm", "p50_ms": 0.4, "p99_ms": 1.5, "loads": 400}]
    figures = {
        "rounds": 7,
        "moved_bytes": 64 * 2**20,
        "paths": rows,
        "latencies": latencies,
        "left_out": {"nixl ucx": "no module", "redis tcp": "no redis-server on the path"},
        "verdicts": verdicts(rows, latencies),
    }
    text = "\n".join(table.lines(figures))
    assert "64 MiB a client and round, 7 rounds" in text
    assert "2 MiB (llama-3-8b) pages, 1 client\n" in text
    assert "2 MiB (llama-3-8b) pages, 2 clients\n" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "shm dense store 10.00 7.00 0.20 0.80 1.50 0.90 1.25" in lines
    assert "client shm hnd load 45,776" in lines
    assert "redis unix hnd load 7,629" in lines
    assert "client shm memory straight a test" in lines
    assert "redis unix unix by torch a test" in lines
    assert "redis tcp: no redis-server on the path" in lines
    assert "NOT MET 0.40 at most 0.25 shm, one page of 2 MiB: median, ms" in lines
    assert "open - at least 0.85 shm load, 2 MiB: of memcpy and one checksum pass" in lines
    assert max(map(len, text.splitlines())) <= 120


def test_a_picture_has_a_bar_for_each_path_and_layout() -> None:
    rows = [row("memcpy", 9.0, level=FLOOR), row("client shm", 6.0, level=WHOLE, layout="cpu")]
    setting = {"machine": "x86_64", "cores": 2}
    _, [[panel]] = table.panels({"rounds": 7, "moved_bytes": 2**20, "paths": rows, "setting": setting})
    assert (panel.labels, panel.series) == (["memcpy", "client shm, cpu"], {"1 client": [9.0, 6.0]})


def test_every_goal_is_about_a_path_and_a_floor_that_are_measured() -> None:
    ours = {*OURS, *end_to_end.PATHS}
    assert {goal.path for goal in thresholds.RATIOS} | {path for path, *_ in thresholds.BESIDE_PEERS} <= ours
    assert {goal.ratio for goal in thresholds.RATIOS} <= thresholds.BASELINES.keys() == interleave.RATIOS.keys()
    assert {goal.layout for goal in thresholds.RATIOS} <= {*ALL_LAYOUTS, thresholds.ANY}
    assert all(path in OURS and other in (None, *baselines.PATHS) for path, _, other, _ in thresholds.TIMES)
