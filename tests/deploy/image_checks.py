"""The images, built for real and run as the chart runs them: unprivileged, with a root that cannot be written.

`make image-check` runs this. tools/image.sh builds them with Debian's buildah on a base of debootstrap, so it needs
root and both programs. docs/kubernetes.md says what it cannot show.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcluster.release import __version__
from kvcluster.runtime.auth import new_token, token_line
from tests.chart.rendering import render
from tests.hosts.netns import Network
from tests.pods.container import Container, Image
from tests.pods.kubelet import Client, Kubelet
from tests.pods.objects import Mount, Pod
from tests.pods.privileges import check_unprivileged
from tests.waiting import eventually

pytestmark = [pytest.mark.timeout(2_400)]

ROOT = Path(__file__).parents[2]
VALUES: dict[str, Any] = yaml.safe_load((ROOT / "helm/kvcluster/values.yaml").read_text(encoding="utf-8"))
TARGETS = ("cpu", "cuda")
LARGEST_MB = 550
BUILDERS = ("cc", "gcc", "g++", "c++", "as", "ld", "make", "cmake", "ninja", "pip", "pip3", "curl", "wget", "git")
STICKY = {"tmp", "var/tmp", "run/lock"}
"""Folders that all may write to, as on every Debian; only an owner removes a file there."""

WORK = """
import json, os, sys
import kvcluster
from kvcluster.transfers.layouts import Buffers
from kvcluster.core.spec import KVSpec
from kvcluster.memory.codec import implementation

spec = KVSpec.uniform(
    model="image", weights="sha256:1", num_layers=2, num_kv_heads=2, head_dim=64, dtype="bfloat16", block_tokens=16
)
def pages(fill):
    return [bytearray([fill(block)]) * spec.page_bytes(0, spec.whole(0)) for block in range(4)]
config = kvcluster.ClientConfig(deadline_ms=10_000)
with kvcluster.connect(sys.argv[1], spec, token=os.environ.get("KVCLUSTER_TOKEN"), config=config) as client:
    prompt, given, out = list(range(64)), pages(lambda block: block + 1), pages(lambda block: 0)
    stored = client.store(prompt, Buffers(given))
    client.flush()
    loaded = client.load(prompt, Buffers(out))
    print(json.dumps({"stored": stored.blocks, "tokens": loaded, "equal": out == given, "codec": implementation(),
                      "torch": "torch" in sys.modules}))
"""
ALL = {"stored": 4, "tokens": 64, "equal": True, "codec": "native", "torch": False}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the root and the settings of each image."""
    folder = tmp_path_factory.mktemp("images")
    building = subprocess.Popen([ROOT / "tools/image.sh", "--keep", folder, *TARGETS], start_new_session=True)
    try:
        assert building.wait() == 0, "the images could not be built"
        yield folder
    finally:
        with suppress(ProcessLookupError):  # a build that took too long would go on, and write into the folder
            os.killpg(building.pid, signal.SIGKILL)
        building.wait()
        shutil.rmtree(folder)


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def settings(built: Path, target: str) -> dict[str, Any]:
    """What the image says of how it is run."""
    inspected = json.loads((built / f"{target}.json").read_text(encoding="utf-8"))
    assert "Healthcheck" not in inspected["Docker"]["config"]
    config: dict[str, Any] = inspected["OCIv1"]["config"]
    return config


@pytest.fixture(scope="module")
def image(built: Path, target: str) -> Image:
    env = dict(each.split("=", 1) for each in settings(built, target)["Env"])
    return Image((built / target).resolve(), env)


def files(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every file and folder of the image by its path from the root, but links."""
    for folder, folders, names in os.walk(root):
        for name in (*folders, *names):
            path = Path(folder, name)
            if not path.is_symlink():
                yield path.relative_to(root).as_posix(), path.stat()


def programs_at(image: Image, name: str) -> list[Path]:
    """The programs of that name on the image's PATH."""
    folders = image.env["PATH"].split(":")
    return [path for folder in folders if os.path.lexists(path := image.root / folder.lstrip("/") / name)]


def test_an_image_says_how_it_is_run_and_what_it_is(built: Path, target: str) -> None:
    config = settings(built, target)
    assert config["User"] == f"{VALUES['runAsUser']}:{VALUES['runAsGroup']}"
    assert (config["Entrypoint"], config["Cmd"]) == (VALUES["image"]["command"], ["--help"])
    assert config["StopSignal"] == "SIGTERM"
    assert config["Labels"]["org.opencontainers.image.version"] == __version__
    assert not config.get("Volumes") and not config.get("ExposedPorts")


def test_an_image_has_nothing_of_its_build(image: Image) -> None:
    found = [name for name in BUILDERS if programs_at(image, name)]
    assert not found
    for left in ("build", "overlay", "mnt/PIP_CERT", "root/.cache", "tmp/.cache"):
        assert not (image.root / left).exists(), left
    assert not any((image.root / "tmp").iterdir())
    assert not list(image.root.glob("opt/kvcluster/lib/python3*/site-packages/pip*"))
    assert not list(image.root.glob("usr/lib/python3/dist-packages/pip*"))
    (native,) = image.root.glob("opt/kvcluster/lib/python3*/site-packages/kvcluster/memory/_native*.so")
    assert native.stat().st_size > 100_000


def test_no_file_of_an_image_gives_privileges_or_can_be_changed_by_its_user(image: Image) -> None:
    found = dict(files(image.root))
    assert len(found) > 5_000
    assert [path for path, each in found.items() if each.st_mode & (stat.S_ISUID | stat.S_ISGID)
            and stat.S_ISREG(each.st_mode)] == []  # fmt: skip
    assert {path for path, each in found.items() if each.st_mode & stat.S_IWOTH} <= STICKY
    assert all(found[path].st_mode & stat.S_ISVTX for path in STICKY & set(found))
    ours = {VALUES["runAsUser"], VALUES["runAsGroup"]}
    assert [path for path, each in found.items() if {each.st_uid, each.st_gid} & ours] == []


def test_torch_is_in_the_image_for_gpus_alone(image: Image, target: str, tmp_path: Path) -> None:
    found = "from importlib.util import find_spec as f; print(all(map(f, ('torch', 'transformers'))), bool(f('numpy')))"
    with started(image, tmp_path) as container:
        assert run(container, "python", "-c", found).split() == [str(target == "cuda")] * 2
        if target == "cuda":
            run(container, "python", "-c", "import kvcluster.engines.transformers, kvcluster.transfers.tensors")


def test_the_image_is_as_small_as_ray_allows(built: Path) -> None:
    sizes = [each.st_size for _, each in files((built / "cpu").resolve()) if stat.S_ISREG(each.st_mode)]
    assert sum(sizes) / 1e6 < LARGEST_MB


def test_a_cluster_runs_where_only_a_folder_for_temporary_files_can_be_written(image: Image, tmp_path: Path) -> None:
    with started(image, tmp_path) as container:
        assert run(container, "kvcluster", "--version") == f"kvcluster {__version__}\n"
        assert "usage: kvcluster" in run(container, "kvcluster", "--help")
        run(container, "python", "-c", "import kvcluster.memory._native")
        run(container, "kvcluster", "up", "--ram-bytes", "64MiB", "--host-bytes", "16MiB")
        check_unprivileged(container)
        assert json.loads(run(container, "python", "-c", WORK, "127.0.0.1:7070")) == ALL
        (shard,) = json.loads(run(container, "kvcluster", "status", "--json"))["shards"]
        assert 0 < shard["free_bytes"] < shard["capacity_bytes"]
        assert "Z" not in run(container, "sh", "-c", "cat /proc/[0-9]*/stat | sed 's/.*) //' | cut -c1")
        run(container, "kvcluster", "down")


def test_the_pods_that_the_chart_renders_run_from_the_image(image: Image) -> None:
    token = new_token()
    tokens = (token_line(token, "ops", operator=True) + "\n").encode()
    secrets = {"cache-kvcluster-auth": {"secret": new_token().encode(), "tokens": tokens}}
    values = {"config": {"shard": {"ram_bytes": "64MiB"}}, "shards": {"replicas": 1}}
    with Kubelet(render(values), secrets, {"engine": Client({"kvcluster-client": "true"}, "llm")}, image) as kubelet:
        kubelet.wait_ready()
        for container in kubelet.containers.values():
            check_unprivileged(container)
        address = f"{kubelet.address('cache-kvcluster-head')}:7070"
        (shard,) = [each for name, each in kubelet.containers.items() if "head" not in name]
        work = ["env", f"KVCLUSTER_TOKEN={token}", "python", "-c", WORK, address]
        assert json.loads(run(shard, *work)) == ALL
        assert [each.stop() for each in (shard, kubelet.containers["cache-kvcluster-head-0"])] == [0, 0]


@contextmanager
def started(image: Image, folder: Path) -> Iterator[Container]:
    """A container that does nothing by itself, on a host without any other."""
    mounts = [Mount("/tmp", "tmp", "emptyDir", "tmp"), Mount("/dev/shm", "shm", "emptyDir", "shm")]
    uid, gid = VALUES["runAsUser"], VALUES["runAsGroup"]
    pod = Pod(
        name="alone", owner="", labels={}, argv=("sleep", "infinity"), env={}, uid=uid, gid=gid, fs_group=gid,
        memory=4 << 30, grace_s=5, mounts=tuple(mounts), probes={}, template="",
    )  # fmt: skip
    folders = [folder / mount.volume for mount in mounts]
    for each in folders:
        each.mkdir()
        each.chmod(0o1777)
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n", encoding="utf-8")
    with Network(["alone"]) as network:
        container = Container(pod, network.command("alone", []), folder / "container", folders, hosts, image)
        try:
            eventually(lambda: comm(container) == "sleep")
            yield container
        finally:
            container.kill()


def comm(container: Container) -> str:
    """The name of the container's first process; "" if there is none yet."""
    with suppress(OSError):
        return Path(f"/proc/{container.pid()}/comm").read_text(encoding="utf-8").strip()
    return ""


def run(container: Container, *argv: str) -> str:
    """Runs it in the container as its user, and returns what it prints."""
    done = subprocess.run(container.inside(argv), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{argv[:3]}: {done.stdout}\n{done.stderr}"
    return done.stdout
