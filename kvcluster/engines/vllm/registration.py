"""Who this engine is to the cluster: the KVSpec that its KV is cached under, and how to come by it without a wait.

The layout is known at start; the fingerprint of the weights has to be read, which takes seconds, and a cluster has to
be found, which takes as long as it wants. Both happen on one thread, `Registration`, beside an engine that serves
already: until it has a client, nothing is loaded and nothing stored. What changed in memory (`withdraw`) is known to
nobody, so from then on the engine is alone under a random weights id, until somebody who knows says what the weights
are (`kvcluster weights set`) or it is started anew. To be told so, and to be seen, it registers again and again.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import kvcluster.engines.vllm.compat as compat
import kvcluster.engines.vllm.weights as weights
from kvcluster.client.client import Client
from kvcluster.client.connect import connect
from kvcluster.config import ClientConfig
from kvcluster.core.messages import EngineInfo
from kvcluster.core.spec import PRIVATE_WEIGHTS, KVSpec
from kvcluster.engines.vllm.settings import ConnectorSettings
from kvcluster.errors import KVClusterError, Unreachable
from kvcluster.transport.base import Unavailable

Log = Callable[[str], object]

_STORE_WAIT_MS = 1_000
"""A shard that is full makes room within a few reports; a long prompt brings more than it keeps free."""

_STORE_NICENESS = 10
"""Nobody waits for a store but its blocks, and everybody for the next token."""

_REGISTER_S = 2.0
"""Between two registrations: several before the cluster takes an engine for gone, and soon after a word for it."""

_PAUSE_S = 1.0
"""Between two tries to reach a cluster: soon enough after it has come up, and nothing to an engine's processor."""


def spec_of(config: Any, layout: compat.Layout, settings: ConnectorSettings, fingerprint: str) -> KVSpec:
    """The spec of an engine without an adapter. Raises SpecError for weights that are not pinned."""
    told = compat.settings_of_model(config)
    rope = told["config"].pop("rope_parameters", None)
    extra = [
        ("config", "sha256:" + hashlib.sha256(_canonical(told).encode()).hexdigest()),
        ("engine", f"vllm-{compat.version()}"),
    ]
    isas = dict.fromkeys(of_group.isa for of_group in layout.formats if of_group.isa)
    if isas:  # they round otherwise, also where they order K and V alike
        extra.append(("isa", "cpu " + ",".join(isas)))
    return KVSpec(
        model=settings.model or PurePath(config.model_config.model).name,
        weights=fingerprint,
        block_tokens=layout.block_tokens,
        groups=layout.groups,
        rope=_canonical(rope),
        extra=tuple(extra),
    )


class Registration:
    """One process's client, as soon as there is one. Constructed idle; `start` begins to look for it.

    `client` and `spec` come together and stay; `why` says what is missing until then. `whole`: it speaks for the engine
    and not for one rank, so that it is this one that registers.
    """

    def __init__(
        self, config: Any, layout: compat.Layout, settings: ConnectorSettings, *, whole: bool, log: Log
    ) -> None:
        self.client: Client | None = None
        self.why = "the weights are being read"
        self._config = config
        self._layout = layout
        self._settings = settings
        self._parts = None if whole else dict(enumerate(layout.parts))
        self._whole = whole
        self._id = os.urandom(8).hex()
        self._withdrawn = 0
        self._private = False
        self._ready = True
        self._log = log
        self._wanted = settings.weights  # "" until they were read
        self._left: Client | None = None  # to be closed, on this object's own thread
        self._stop = threading.Event()
        self._changed = threading.Condition()  # its lock may be taken again by who has it
        self._thread = threading.Thread(target=self._run, name="kvcluster-join", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def spec(self) -> KVSpec | None:
        """What is cached under, once that is known and the cluster has been reached."""
        client = self.client
        return None if client is None else client.spec

    def withdraw(self, *, ready: bool) -> None:
        """From now on nobody shares with this engine: what its weights are is not known any more. `ready`: nothing is
        left in it that the weights of before have computed, so that it may share again once they have a name."""
        with self._changed:
            self._withdrawn += 1
            self._private, self._ready = True, ready
            self.use(PRIVATE_WEIGHTS + os.urandom(16).hex())

    def use(self, weights_id: str) -> None:
        """Caches under these weights from now on. What is under way is broken off."""
        with self._changed:
            if self._wanted == weights_id:
                return
            self._wanted = weights_id
            if self.client is not None:  # one that was left before may still wait to be closed
                self._left, self.client = self.client, None
            self.why = "the weights have changed"
            self._changed.notify_all()

    def close(self) -> None:
        self._stop.set()
        with self._changed:
            client, self.client = self.client, None
            self._changed.notify_all()
        if client is not None:
            client.close()

    def _run(self) -> None:
        try:
            self._fingerprint()
            while not self._stop.is_set():
                self._join()
                self._attend()
                with self._changed:
                    left, self._left = self._left, None
                if left is not None:
                    left.close()
        except KVClusterError as error:
            self.why = str(error)
            self._log(f"neither loads nor stores: {error}")
        except Exception as error:  # a thread that dies silently would be a riddle
            self.why = f"{type(error).__name__}: {error}"
            self._log(f"neither loads nor stores: {self.why}")

    def _attend(self) -> None:
        """Registers until there is no client any more."""
        while (client := self.client) is not None and not self._stop.is_set():
            if self._whole:
                self._register(client)
            with self._changed:
                self._changed.wait_for(
                    lambda: self.client is None or self._stop.is_set(), _REGISTER_S if self._whole else None
                )

    def _register(self, client: Client) -> None:
        with self._changed:
            info = self._info(client.spec)
        try:
            told = client.register(info)
        except (Unavailable, KVClusterError):  # it is served all the same
            return
        with self._changed:
            if told.weights and self._private and self._withdrawn == info.withdrawn:
                self._log(f"the weights are {told.weights} from now on, as an operator has said")
                self._private = False
                self.use(told.weights)

    def _info(self, spec: KVSpec) -> EngineInfo:
        return EngineInfo(
            engine=self._id,
            name=f"{socket.gethostname()}:{os.getpid()}",
            model=spec.model,
            weights=spec.weights,
            facts=compat.facts(self._config, self._layout),
            private=self._private,
            withdrawn=self._withdrawn,
            ready=self._ready,
        )

    def _fingerprint(self) -> None:
        if not self._wanted:
            read = weights.fingerprint(compat.checkpoint(self._config))
            with self._changed:
                if not self._wanted:  # a reset may have come first
                    self._wanted = read

    def _join(self) -> None:
        """A client for the weights that are wanted now. Raises what no second try would mend."""
        settings, wanted = self._settings, self._wanted
        spec = spec_of(self._config, self._layout, settings, wanted)
        client_config = ClientConfig(
            deadline_ms=settings.load_ms,
            transports=settings.transports,
            accept=settings.accept,
            store_wait_ms=_STORE_WAIT_MS,
            store_niceness=_STORE_NICENESS,
        )
        told = ""
        while not self._stop.is_set() and self._wanted == wanted:
            try:
                client = connect(settings.address, spec, token=settings.token, part=self._parts, config=client_config)
            except Unreachable as error:
                self.why = str(error)
                if told != self.why:
                    self._log(f"computes everything until the cluster is there: {error}")
                    told = self.why
                self._stop.wait(_PAUSE_S)
                continue
            if self._parts is not None:  # the scheduler's side asks the coordinator alone
                client.warm_up()
            with self._changed:
                if self._wanted == wanted and not self._stop.is_set():
                    self.client, self.why = client, ""
                    self._log(f"caches {spec.model} under weights {wanted} at {settings.address}")
                    return
            client.close()


class Adapters:
    """The content of the LoRA adapters in use, each read once, on a thread of its own, and never waited for.

    The engine keeps what it has loaded under a number, whatever becomes of the files; so that is what is remembered.
    """

    def __init__(self, log: Log, fingerprint: Callable[[str], str] = weights.fingerprint) -> None:
        self._fingerprint = fingerprint
        self._log = log
        self._known: dict[int, str | None] = {0: ""}  # None while it is read
        self._lock = threading.Lock()

    def get(self, number: int, path: str) -> str | None:
        """The content hash of the adapter of that number, "" for no adapter, None while it is not known."""
        with self._lock:
            if number in self._known:
                return self._known[number]
            self._known[number] = None
        threading.Thread(target=self._read, args=(number, path), name="kvcluster-adapter", daemon=True).start()
        return None

    def _read(self, number: int, path: str) -> None:
        try:
            read = self._fingerprint(path)
        except KVClusterError as error:
            self._log(f"neither loads nor stores for the adapter {path}: {error}")
            return
        except Exception as error:  # a thread that dies silently would be a riddle
            self._log(f"neither loads nor stores for the adapter {path}: {type(error).__name__}: {error}")
            return
        with self._lock:
            self._known[number] = read


def _canonical(value: object) -> str:
    if isinstance(value, Mapping):
        value = dict(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
