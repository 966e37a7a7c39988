"""A pod's container as processes of this machine: with the rendered command, environment, user, files and limit of
memory, in namespaces of its own, and with a root of its own that cannot be written.

The root is an image's (tools/image.sh), or in place of one it has this machine's programs and the installed kvcluster.
What a container runtime does besides is not done: no seccomp profile, no user namespace.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import kvcluster
from tests.pods.objects import Mount, Pod
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
_CGROUPS = Path("/sys/fs/cgroup/memory")
_ETC = ("passwd", "group", "nsswitch.conf", "ld.so.cache", "localtime")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_STAND_INS = "stand-ins"
_KILL_S = 10.0


@dataclass(frozen=True, slots=True)
class Image:
    """What a container is made from: a folder that is its root, which is left as it is, and its environment."""

    root: Path
    env: Mapping[str, str]


class Container:
    """One container. `enter`: a command line that runs another on the pod's host. `folders`: the folder for each mount.
    `folder`: for its root and its log. `image`: what it is made from, or the folder of a virtual environment, which
    takes an image's place with this machine's programs."""

    def __init__(
        self,
        pod: Pod,
        enter: Sequence[str],
        folder: Path,
        folders: Sequence[Path],
        hosts: Path,
        image: Image | Path = Path(sys.prefix),
    ) -> None:
        self.pod, self._image = pod, image
        self._folder = folder
        self._cgroup = memory_limit(f"{folder.parent.name}-{pod.name}", pod.memory)
        script = folder / "run.sh"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "root").mkdir(exist_ok=True)
        script.write_text("\n".join(self._script(folders, hosts)) + "\n", encoding="utf-8")
        namespaces = ["--mount", "--pid", "--ipc", "--uts", "--cgroup", "--fork", "--kill-child"]
        joining = f"echo $$ > {self._cgroup}/cgroup.procs; " if self._cgroup else ""
        command = ["sh", "-ec", f'{joining}exec "$@"', "sh", *enter, "unshare", *namespaces, "sh", "-e", str(script)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def log(self) -> Path:
        """What the container has said, over all its starts."""
        return self._folder / "log"

    def memory_used(self) -> int | None:
        """The most bytes of memory that it has had; None where the machine has no cgroups of version 1 to write to, and
        so no limit is set."""
        if self._cgroup is None:
            return None
        return int((self._cgroup / "memory.max_usage_in_bytes").read_text(encoding="ascii"))

    def runs(self) -> bool:
        return self._process.poll() is None

    def pid(self) -> int:
        """Its first process, as the machine numbers it. Raises ProcessLookupError if there is none."""
        pid = self._process.pid
        with suppress(OSError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
            if children:
                return int(children[0])
        raise ProcessLookupError(f"{self.pod.name} does not run")

    def stop(self) -> int | None:
        """Ends it as a kubelet does: SIGTERM, and after the time of grace SIGKILL. Returns its status, None if it had
        to be killed."""
        with suppress(ProcessLookupError):
            os.kill(self.pid(), signal.SIGTERM)
        try:
            return self._process.wait(self.pod.grace_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends it at once, with all its processes."""
        with suppress(ProcessLookupError):
            os.kill(self.pid(), signal.SIGKILL)
        self._process.kill()
        self._process.wait(_KILL_S)
        if self._cgroup is not None and self._cgroup.exists():
            eventually(self._left, _KILL_S)

    def _left(self) -> bool:
        """Takes the group of processes away, once the last has left it."""
        assert self._cgroup is not None
        with suppress(OSError):
            self._cgroup.rmdir()
        return not self._cgroup.exists()

    def inside(self, argv: Sequence[str]) -> list[str]:
        """A command line that runs `argv` in this container, as its user."""
        enter = ["nsenter", f"--target={self.pid()}", "--mount", "--pid", "--ipc", "--uts", "--net", "--root"]
        return [*enter, *self._as_its_user(), *argv]

    def _script(self, folders: Sequence[Path], hosts: Path) -> list[str]:
        root = self._folder / "root"
        lines = ["mount --make-rprivate /", f"mount -t tmpfs -o mode=755 tmpfs {root}", f"cd {root}"]
        lines += _machine_root() if isinstance(self._image, Path) else _image_root(self._image)
        lines += [
            f"cp {hosts} etc/hosts",
            "mount -t proc proc proc",
            "mount --rbind /sys sys",
            f"for each in {' '.join(_DEVICES)}; do : > dev/$each; mount --bind /dev/$each dev/$each; done",
            "ln -s /proc/self/fd dev/fd",
        ]
        if self._cgroup is not None:
            cgroups = "sys/fs/cgroup"
            lines += [f"mount -t tmpfs tmpfs {cgroups}", f"mkdir {cgroups}/memory"]
            lines.append(f"mount -t cgroup -o memory cgroup {cgroups}/memory")
        for mount, folder in zip(self.pod.mounts, folders, strict=True):
            lines += _mounted(mount, folder)
        if isinstance(self._image, Path):  # last, since they may lie below a folder that is mounted
            code = (sys.base_prefix, str(self._image), str(Path(kvcluster.__file__).parents[1]))
            lines += [f"mkdir -p .{each}; mount --rbind {each} .{each}" for each in dict.fromkeys(code)]
        lines += [
            f"hostname {self.pod.name}",
            "mount -o remount,ro,bind .",
            f"exec chroot . {shlex.join([*self._as_its_user(), *self.pod.argv])}",
        ]
        return lines

    def _as_its_user(self) -> list[str]:
        """What gives up every privilege and becomes the pod's user, of its groups, with its environment."""
        pod, image = self.pod, self._image
        nothing = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        user = ["setpriv", f"--reuid={pod.uid}", f"--regid={pod.gid}", f"--groups={pod.fs_group}", *nothing]
        programs = f"{image}/bin:/usr/local/bin:/usr/bin:/bin:/{_STAND_INS}"
        of_image = {"PATH": programs} if isinstance(image, Path) else image.env
        env = {**of_image, "HOSTNAME": pod.name, **pod.env}
        return [*user, "env", "--chdir=/", "-i", *(f"{key}={value}" for key, value in env.items())]


def memory_limit(name: str, nbytes: int) -> Path | None:
    """Makes a group of processes that may use so much memory. Returns its folder; None if this machine allows none."""
    cgroup = _CGROUPS / f"kvcluster-{name}"
    try:
        cgroup.mkdir(exist_ok=True)
        (cgroup / "memory.limit_in_bytes").write_text(str(nbytes), encoding="ascii")
    except OSError:
        return None
    return cgroup


def _machine_root() -> list[str]:
    return [
        "mkdir usr etc proc sys dev var",
        "mount --rbind /usr usr",
        "for each in bin sbin lib lib32 lib64; do",
        "  if [ -L /$each ]; then cp -P /$each .",
        "  elif [ -d /$each ]; then mkdir $each; mount --rbind /$each $each; fi",
        "done",
        f"mkdir {_STAND_INS}",
        f"if [ ! -e /usr/bin/valkey-server ]; then ln -s /usr/bin/redis-server {_STAND_INS}/valkey-server; fi",
        f"for each in {' '.join(_ETC)}; do if [ -e /etc/$each ]; then cp -L /etc/$each etc/; fi; done",
    ]


def _image_root(image: Image) -> list[str]:
    """The image with a layer over it, in which folders are made to mount upon."""
    layers = f"lowerdir={image.root.resolve()},upperdir=upper,workdir=work"
    return ["mkdir upper work merged", f"mount -t overlay -o {layers} overlay merged", "cd merged"]


def _mounted(mount: Mount, folder: Path) -> list[str]:
    lines = [f"mkdir -p .{mount.path}", f"mount --bind {folder} .{mount.path}"]
    return [*lines, f"mount -o remount,ro,bind .{mount.path}"] if mount.read_only else lines
