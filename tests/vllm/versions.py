"""Toy engines whose KV depends on the version of their weights, and vLLM's own core that changes it.

`Trained` engines compute what a `Text` says from the tokens and from the version that the weights have when a position
is computed. So KV of another version is nonsense to whoever reads it, as KV of other tokens is.

`core_of` gives an engine the part of vLLM's EngineCore that pauses, calls workers and sets versions: its methods are
vLLM's, its executor is a stand-in that changes the toy's weights where the call says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore

from tests.vllm.toy import _MASK, Engine, Picture, Text


class VersionedText(Text):
    """A text whose positions are computed with weights of a number each."""

    def __init__(self, prompt: Sequence[int], pictures: Sequence[Picture] = (), salt: str | None = None) -> None:
        super().__init__(prompt, pictures, salt)
        self._weights = 0

    def computed_from(self, start: int, weights: int, known: int) -> None:
        """Positions from `start` on are computed with these weights. The first `known` tokens have been said."""
        if known:
            self._reach(known - 1)
        del self._states[start:], self._tokens[max(start, known) :]
        self._weights = weights

    def _reach(self, at: int) -> None:
        while len(self._states) <= at:
            number = len(self._states)
            before = self._states[-1] if self._states else self._first
            if number < len(self._tokens):
                token = self._tokens[number]
            else:
                token = self.prompt[number] if number < len(self.prompt) else (before >> 40) % 250
                self._tokens.append(token)
            before ^= (self._seen.get(number, 0) << 8) ^ (self._weights << 20)
            self._states.append(((before ^ (token + 1)) * 6364136223846793005 + 1442695040888963407) & _MASK)


class Trained:
    """An engine and its weights, and the core that changes them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.weights = 0
        self._computed: dict[str, int] = {}  # by request: the weights of its last step
        engine.on_step = self._on_step
        self.core = core_of(engine, self)

    def add(self, name: str, prompt: Sequence[int], **more: Any) -> None:
        self.engine.add(name, prompt, **more)
        self.engine.texts[name] = VersionedText(prompt)

    def _on_step(self, output: SchedulerOutput) -> None:
        """What the step computes is of the present weights: of a request that begins, whatever it has found too."""
        cached = output.scheduled_cached_reqs
        begins = {new.req_id for new in output.scheduled_new_reqs} | set(cached.resumed_req_ids)
        at = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        said = dict(zip(cached.req_ids, cached.num_output_tokens, strict=True))
        for name in output.num_scheduled_tokens:
            text = self.engine.texts[name]
            assert isinstance(text, VersionedText)
            known = len(text.prompt) + said.get(name, 0)
            if name in begins:
                text.computed_from(0, self.weights, known)
            elif self._computed[name] != self.weights:
                text.computed_from(at[name], self.weights, known)
            self._computed[name] = self.weights

    def update(self, version: str | None, *, rpc: str = "update_weights", by: int = 1) -> None:
        """Changes the weights as vLLM's trainers do: start, update, finish, and the version."""
        for method in ("start_weight_update", rpc, "finish_weight_update"):
            self.core.collective_rpc(method, kwargs={"by": by})
        if version is not None:
            self.core.set_weight_version(version)

    def pause(self, mode: str = "keep", *, clear_cache: bool = True) -> None:
        """As `pause_generation`: steps that are out end first."""
        if mode == "abort":
            for name in list(self.engine.scheduler.requests):
                self.engine.abort(name)
            self.engine.finish()
        while self.engine._out:
            self.engine.take_back()
        self.core.pause_scheduler(mode, clear_cache=clear_cache)

    def resume(self) -> None:
        self.core.resume_scheduler()


class _Executor:
    """The workers, where vLLM's core calls them."""

    def __init__(self, trained: Trained) -> None:
        self._trained = trained

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> list[None]:
        if method in ("update_weights", "nudge") or callable(method):
            self._trained.weights += (kwargs or {}).get("by", 1)
        return [None]

    def reset_mm_cache(self) -> None:
        """A toy has none."""

    def reset_encoder_cache(self) -> None:
        """A toy has none."""


def core_of(engine: Engine, trained: Trained) -> EngineCore:
    """Returns vLLM's core over the engine's scheduler, which can pause, resume, call workers and set versions."""
    core = object.__new__(EngineCore)
    core.scheduler = engine.scheduler
    core.model_executor = _Executor(trained)  # type: ignore[assignment]
    core.mm_receiver_cache = None
    core._weight_version = "default"
    core.vllm_config = SimpleNamespace()  # type: ignore[assignment]
    return core
