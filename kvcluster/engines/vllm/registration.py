"""The engine's identity in the cluster: the KVSpec under which its KV is cached, made without delaying the engine.

The layout is known at start. Computing the fingerprint of the weights takes seconds, and connecting to a cluster takes
an unbounded time. One thread of `Registration` does both while the engine already serves requests: until there is a
client, nothing is loaded and nothing is stored. If the weights change in memory (`withdraw`), their identity is
unknown: from then on the engine caches under a random weights id that no other engine shares, until an operator names
the weights (`kvcluster weights set`) or the engine restarts. An engine of a training run (weight_versions.py) caches
under nothing while its weights have no version, and then under that version. The engine registers periodically, so that
operators see it and it receives that name.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import kvcluster.engines.vllm.compat as compat
import kvcluster.engines.vllm.weight_versions as weight_versions
import kvcluster.engines.vllm.weights as weights
from kvcluster.client.client import Client
from kvcluster.client.connect import connect
from kvcluster.client.metrics import watch
from kvcluster.config import ClientConfig
from kvcluster.core.messages import EngineInfo
from kvcluster.core.spec import PRIVATE_WEIGHTS, KVSpec
from kvcluster.engines.texts import canonical, error_text, process_name, settings_digest
from kvcluster.engines.vllm.settings import ConnectorSettings
from kvcluster.errors import CallerError, KVClusterError, LimitError, Unreachable
from kvcluster.release import PROTOCOL_VERSION
from kvcluster.transport.base import Unavailable
from kvcluster.transport.credentials import CONNECTION
from kvcluster.transport.thread_start import start_thread

Log = Callable[[str], object]

_STORE_WAIT_MS = 1_000
"""A full shard makes room within a few reports; a long prompt needs more than the room that a shard keeps free."""

_STORE_NICENESS = 10
"""Niceness of the store threads: no request waits for a store, but every request waits for its next token."""

_REGISTER_S = 2.0
"""Time between two registrations: short enough for several before the cluster drops the engine, and for the engine to
learn soon that its weights were named."""

_PAUSE_S = 1.0
"""Time between two attempts to connect: short enough after the cluster has started, and negligible CPU time."""


def spec_of(config: Any, layout: compat.Layout, settings: ConnectorSettings, fingerprint: str) -> KVSpec:
    """Returns the spec of an engine without an adapter. Raises SpecError for weights that are not pinned."""
    found = compat.settings_of_model(config)
    rope = found["config"].pop("rope_parameters", None)
    extra = [
        ("config", settings_digest(found)),
        ("engine", f"vllm-{compat.version()}"),
    ]
    isas = dict.fromkeys(of_group.isa for of_group in layout.formats if of_group.isa)
    if isas:  # kernels round differently, even if they order K and V alike
        extra.append(("isa", "cpu " + ",".join(isas)))
    if not settings.share_across_devices:
        extra += layout.kernels
    return KVSpec(
        model=settings.model or PurePath(config.model_config.model).name,
        weights=fingerprint,
        block_tokens=layout.block_tokens,
        groups=layout.groups,
        rope=canonical(rope),
        extra=tuple(sorted(extra)),
    )


class Registration:
    """One process's client, as soon as it is connected. Constructed idle; `start` begins to connect.

    `client` and `spec` are set together; until then `why` names what is missing. `run` is the training run that the
    settings name, "" for none. `reader` is a client of the tenant
    that the engine also reads (`also_reads`), None while there is none. `whole` means that this object acts
    for the whole engine and not for one rank, so it is the one that registers.
    """

    def __init__(
        self, config: Any, layout: compat.Layout, settings: ConnectorSettings, *, whole: bool, log: Log
    ) -> None:
        self.client: Client | None = None
        self.reader: Client | None = None
        self.why = "the weights are being read"
        self._config = config
        self._layout = layout
        self._settings = settings
        self._parts = None if whole else {at: part for at, part in enumerate(layout.parts) if part is not None}
        self._whole = whole
        self._id = os.urandom(8).hex()
        self._withdrawn = 0
        self._private = False
        self._ready = True
        self.log = log
        self.run = settings.run
        self._base = ""  # of a run: the fingerprint of what the engine started with
        self._base_known = False
        self._version: str | None = None  # of a run: what its weights are now, None if they are what it started with
        self._wanted = settings.pinned_weights  # "" until it is known
        self._left: list[Client] = []  # to be closed on this object's own thread
        self._stop = threading.Event()
        self._changed = threading.Condition()  # its lock is reentrant
        self._thread = threading.Thread(target=self._run, name="kvcluster-join", daemon=True)

    def start(self) -> None:
        start_thread(self._thread)

    @property
    def spec(self) -> KVSpec | None:
        """The spec under which KV is cached; None until it is known and the client is connected."""
        client = self.client
        return None if client is None else client.spec

    @property
    def wanted(self) -> str:
        """The weights id under which KV is to be cached, with a client or not yet; "" while none is known."""
        return self._wanted

    def withdraw(self, *, ready: bool) -> None:
        """Stops sharing with other engines, because the weights are no longer known. `ready` means that the engine
        holds no KV computed with the previous weights, so it may share again once the new weights have a name. An
        engine of a run caches nothing until `use_version`."""
        with self._changed:
            self._withdrawn += 1
            self._private, self._ready = not self.run, ready
            self._version = ""
            self.use("" if self.run else PRIVATE_WEIGHTS + os.urandom(16).hex())

    def use_version(self, version: str) -> None:
        """Caches under this version of the run's weights from now on, or as soon as the fingerprint of what the engine
        started with is known."""
        with self._changed:
            self._private, self._version = False, version
            self._use_known()

    def _use_known(self) -> None:
        """Uses what is known of a run's weights. Called under the lock."""
        if not self._base_known or self._version == "":  # an empty version is none
            return
        if self._version is not None:
            self.use(weight_versions.version_weights(self.run, self._base, self._version))
        elif self._base:
            self.use(self._base)

    def use(self, weights_id: str) -> None:
        """Caches under these weights from now on. Cancels transfers in progress."""
        with self._changed:
            if self._wanted == weights_id:
                return
            self._wanted = weights_id
            self._leave()
            self.why = "the weights have changed"
            self._changed.notify_all()

    def _leave(self) -> None:
        """Drops both clients, which are to be closed. Called under the lock."""
        self._left += [client for client in (self.client, self.reader) if client is not None]
        self.client = self.reader = None

    def _close_left(self) -> None:
        with self._changed:
            left, self._left = self._left, []
        for client in left:
            client.close()

    def close(self) -> None:
        self._stop.set()
        with self._changed:
            self._leave()
            self._changed.notify_all()
        self._close_left()

    def _run(self) -> None:
        try:
            self._fingerprint()
            while not self._stop.is_set():
                self._await_weights()
                self._join()
                self._attend()
                self._close_left()
        except Exception as error:  # a thread must not die silently
            self.why = error_text(error)
            self.log(f"neither loads nor stores: {self.why}")

    def _await_weights(self) -> None:
        """Waits until there are weights to cache under, or this object is closed."""
        with self._changed:
            if not self._wanted and not self._stop.is_set():
                self.why = "the weights have no version yet"
                self.log(f"neither loads nor stores until the weights of {self.run} have a version")
        self._close_left()
        with self._changed:
            self._changed.wait_for(lambda: bool(self._wanted) or self._stop.is_set())

    def _attend(self) -> None:
        """Registers periodically, and connects the reader, until the client is dropped or this object is closed."""
        refused = ""
        while (client := self.client) is not None and not self._stop.is_set():
            if self._whole:
                self._register(client)
            if self._settings.also_reads and self.reader is None:
                refused = self._join_other(client, refused)
            waits = self._whole or (self._settings.also_reads and self.reader is None)
            with self._changed:
                self._changed.wait_for(
                    lambda: self.client is None or self._stop.is_set(), _REGISTER_S if waits else None
                )

    def _join_other(self, client: Client, logged: str) -> str:
        """Connects the reader. Returns why it could not be connected, which is logged unless it was."""
        owner = self._settings.also_reads
        try:
            reader = self._connected(client.spec, reads=owner)
        except KVClusterError as error:
            if (why := str(error)) != logged:
                self.log(f"does not read the KV of tenant {owner!r} yet: {why}")
            return why
        with self._changed:
            kept = self.client is client and not self._stop.is_set()
            if kept:
                self.reader = reader
        if kept:
            self.log(f"reads the KV of tenant {owner!r} too")
        else:
            reader.close()
        return ""

    def _register(self, client: Client) -> None:
        with self._changed:
            info = self._info(client.spec)
        try:
            answer = client.register(info)
        except (Unavailable, KVClusterError):  # loads and stores work without it
            return
        with self._changed:
            if answer.weights and self._private and self._withdrawn == info.withdrawn:
                self.log(f"an operator has named the weights {answer.weights}; caching under them from now on")
                self._private = False
                self.use(answer.weights)

    def _info(self, spec: KVSpec) -> EngineInfo:
        return EngineInfo(
            engine=self._id,
            name=process_name(),
            model=spec.model,
            weights=spec.weights,
            facts=compat.facts(self._config, self._layout),
            private=self._private,
            withdrawn=self._withdrawn,
            ready=self._ready,
            protocol=PROTOCOL_VERSION,
        )

    def _fingerprint(self) -> None:
        if self.run:
            base = self._read_base()
            with self._changed:
                self._base, self._base_known = base, True
                self._use_known()
        elif not self._wanted:
            read = weights.fingerprint(compat.checkpoint(self._config))
            with self._changed:
                if not self._wanted:  # a reset may have come first
                    self._wanted = read

    def _read_base(self) -> str:
        """Returns the fingerprint of what a run's engine has started with, "" if that has none: its first weights are
        those of the first version that is set."""
        try:
            return weights.fingerprint(compat.checkpoint(self._config))
        except CallerError as error:
            self.log(f"the first weights of {self.run} are not cached: {error}")
            return ""

    def _join(self) -> None:
        """Connects a client for the current weights, retrying while the cluster is unreachable. Raises for errors that
        a retry would not fix."""
        settings, wanted = self._settings, self._wanted
        if not wanted:
            return
        spec = spec_of(self._config, self._layout, settings, wanted)
        logged = ""
        while not self._stop.is_set() and self._wanted == wanted:
            try:
                client = self._connected(spec)
            except (Unreachable, LimitError) as error:  # a full cluster makes room again
                self.why = str(error)
                if logged != self.why:
                    self.log(f"computing everything until the cluster answers: {error}")
                    logged = self.why
                self._stop.wait(_PAUSE_S)
                continue
            with self._changed:
                if self._wanted == wanted and not self._stop.is_set():
                    watch(client)
                    self.client, self.why = client, ""
                    self.log(f"caching {spec.model} under weights {wanted} at {settings.address}")
                    return
            client.close()

    def _connected(self, spec: KVSpec, *, reads: str | None = None) -> Client:
        """Returns a client with these settings, whose connections are open. Raises as `connect`."""
        settings = self._settings
        config = ClientConfig(
            deadline_ms=settings.load_ms,
            transports=settings.transports,
            accept=settings.accept,
            socket_dir=settings.socket_dir,
            **{name: getattr(settings, name) for name in CONNECTION},
            store_wait_ms=_STORE_WAIT_MS,
            store_niceness=_STORE_NICENESS,
        )
        part = self._parts
        client = connect(settings.address, spec, token=settings.token, part=part, reads=reads, config=config)
        if part is not None:  # the scheduler's side talks only to the coordinator
            client.warm_up()
        return client


class Adapters:
    """Content hashes of the LoRA adapters in use. Each is read once, on its own thread; callers never wait for it.

    The engine keeps an adapter under a number once loaded, even if its files change, and may load it again later, from
    the path that the next request gives. So hashes are kept by number, and a number that requests give with different
    paths has none any more: which of them the engine computes with is not known.
    """

    def __init__(self, log: Log, fingerprint: Callable[[str], str] = weights.fingerprint) -> None:
        self._fingerprint = fingerprint
        self._log = log
        self._paths: dict[int, str | None] = {0: ""}  # None where requests give several
        self._known: dict[int, str] = {0: ""}
        self._lock = threading.Lock()

    def get(self, number: int, path: str) -> str | None:
        """Returns the content hash of the adapter with that number, "" for no adapter, None while it is not known."""
        with self._lock:
            if number in self._paths:
                if self._paths[number] == path:
                    return self._known.get(number)
                if self._paths[number] is not None:
                    self._paths[number] = None
                    self._log(
                        f"neither loads nor stores for adapter {number}: requests give several paths, also {path}"
                    )
                return None
            self._paths[number] = path
        try:
            start_thread(
                threading.Thread(target=self._read, args=(number, path), name="kvcluster-adapter", daemon=True)
            )
        except KVClusterError as error:  # the next request tries again
            with self._lock:
                self._paths.pop(number, None)
            self._log(f"neither loads nor stores for the adapter {path} yet: {error}")
        return None

    def _read(self, number: int, path: str) -> None:
        try:
            read = self._fingerprint(path)
        except Exception as error:  # a thread must not die silently
            self._log(f"neither loads nor stores for the adapter {path}: {error_text(error)}")
            return
        with self._lock:
            self._known[number] = read
