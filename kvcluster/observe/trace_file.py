"""Trace files: what engines in observe mode write, and `kvcluster report` reads. Hashes and counts, no tokens.

JSON lines, UTF-8, written by append. The first line is the header: which engine, which spec. Then lines of four kinds:

    {"request": {...}}      one request (ObservedRequest)
    {"weights": "..."}      the weights' fingerprint, once it is known
    {"cost": {...}}         what observing took so far; the last line counts
    {"note": "..."}         a sentence for people, such as why an engine is not served

A file has a limit. When half of it is reached, the file gets the suffix OLD, in place of an earlier one, and a new one
begins with the same header: so the newest half is always kept. `read_traces` joins the two by the id in their headers.

Block hashes are cut to HASH_BYTES: enough to tell blocks apart, and eight characters in a line. A process may be killed
within a write, and a disk may be full: lines that cannot be parsed are dropped, and named in `EngineTrace.dropped`.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kvcluster.core.groups import Part
from kvcluster.core.ids import BlockHash
from kvcluster.core.spec import KVSpec
from kvcluster.errors import ConfigError, KVClusterError
from kvcluster.observe.reuse_prediction import ObservedRequest
from kvcluster.wire.common import decode_spec, encode_spec

FORMAT = 1
PREFIX, SUFFIX, OLD = "kvcluster-trace-", ".jsonl", ".old.jsonl"
DEFAULT_FOLDER = Path("~/.cache/kvcluster/traces")

MODES = ("on", "observe", "off")
"""Of an engine's integration: it loads and stores; it moves nothing and writes a trace; it does nothing."""

_MOST = 2**62
"""The largest number of a line: sums of them are exact, and still numbers of milliseconds that can be printed."""

_SAID_CHARS = 1_024

HASH_BYTES = 6
"""Of ten million blocks, two share a hash with a probability of a sixth; that changes no prediction."""

UNREAD_WEIGHTS = "unread"
"""The weights of a spec while, or because, their fingerprint is not known."""


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """`id` is random, of one process. `spec` is None for an engine that is not served. `parts` are those of one rank.
    `facts` are for people: releases, device."""

    id: str
    engine: str
    spec: KVSpec | None = None
    parts: tuple[Part | None, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class ObservingCost:
    """What observing took of an engine's time so far: `steps` and `requests`, and the nanoseconds spent in hooks by
    each step and each request; `dropped` requests were not written because too many waited or a write failed."""

    steps: int = 0
    step_ns: int = 0
    worst_step_ns: int = 0
    requests: int = 0
    request_ns: int = 0
    dropped: int = 0


@dataclass(slots=True)
class EngineTrace:
    """What one process observed. `weights` is "" if their fingerprint never became known. `dropped` are sentences about
    lines that could not be read."""

    header: TraceHeader
    weights: str = ""
    requests: list[ObservedRequest] = field(default_factory=list)
    cost: ObservingCost = field(default_factory=ObservingCost)
    notes: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    @property
    def spec(self) -> KVSpec | None:
        """The spec with the weights that were found out; None for an engine that is not served."""
        spec = self.header.spec
        if spec is None or not self.weights:
            return spec
        return replace(spec, weights=self.weights)


# ------------------------------------------------------------------------------------------------------- lines


def header_line(header: TraceHeader) -> dict[str, Any]:
    """Returns the first line of a file, as a value for JSON."""
    return {
        "kvcluster_trace": FORMAT,
        "id": header.id,
        "engine": header.engine,
        "spec": encode_spec(header.spec).hex() if header.spec is not None else None,
        "parts": [list(part) if part is not None else None for part in header.parts],
        "facts": dict(header.facts),
    }


def request_line(request: ObservedRequest) -> dict[str, Any]:
    """Returns a request's line, as a value for JSON. The engine is that of the file, unless it is a router's."""
    values = {one.name: getattr(request, one.name) for one in fields(ObservedRequest)}
    return {"request": values | {"chain": base64.b64encode(b"".join(request.chain)).decode("ascii")}}


def cost_line(cost: ObservingCost) -> dict[str, Any]:
    """Returns the line of what observing took so far, as a value for JSON."""
    return {"cost": asdict(cost)}


def shortened(hashes: Iterable[BlockHash]) -> tuple[bytes, ...]:
    """Returns block hashes as a trace has them."""
    return tuple(block[:HASH_BYTES] for block in hashes)


# ----------------------------------------------------------------------------------------------------- reading


def read_traces(paths: Sequence[Path]) -> tuple[list[EngineTrace], list[str]]:
    """Returns the traces in these files and folders, in the order of their names, and a sentence for each file that is
    none. Raises ConfigError if there is no trace at all, or a file cannot be read."""
    traces: dict[str, EngineTrace] = {}
    strange = [
        f"{path}: no trace of this release, as its first line is no header of format {FORMAT}; not used"
        for path in _files(paths)
        if not _read_file(path, traces)
    ]
    if not traces:
        why = "; ".join(strange) or "start an engine in observe mode first"
        raise ConfigError(f"there is no trace in {', '.join(map(str, paths))}: {why}")
    return list(traces.values()), strange


def _files(paths: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += [file for file in path.glob(f"{PREFIX}*{SUFFIX}") if file.is_file()]  # no pipe, which would wait
        elif path.exists():
            found.append(path)
        else:
            raise ConfigError(f"{path} does not exist; give trace files, or folders of them")
    # The older half of a trace before the newer one.
    return sorted(found, key=lambda file: (file.name.removesuffix(OLD).removesuffix(SUFFIX), not file.match(f"*{OLD}")))


def _read_file(path: Path, traces: dict[str, EngineTrace]) -> bool:
    """Adds the lines of a file to the trace of its header's id. Returns False if it has no header."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from None
    header = _header(lines[0])
    if header is None:
        return False
    trace = traces.setdefault(header.id, EngineTrace(header))
    wrong = 0
    for number, line in enumerate(lines[1:], 2):
        if line and not _take(line, trace):
            if number == len(lines):  # no newline behind it
                trace.dropped.append(f"{path}, line {number}: torn, as the process ended while it wrote it; dropped")
            else:
                wrong += 1
    if wrong:
        trace.dropped.append(f"{path}: {wrong} line(s) cannot be read, as after a full disk; dropped")
    return True


def _header(line: bytes) -> TraceHeader | None:
    given = _parsed(line)
    try:
        if given is None or given["kvcluster_trace"] != FORMAT:
            return None
        spec = decode_spec(bytes.fromhex(given["spec"])) if given["spec"] is not None else None
        parts = tuple(Part(*map(_number, part)) if part is not None else None for part in given["parts"])
        _check_parts(spec, parts)
        facts = {_words(name): _words(value) for name, value in given["facts"].items()}
        return TraceHeader(_words(given["id"]), _words(given["engine"]), spec, parts, facts)
    except (KeyError, TypeError, ValueError, AttributeError, KVClusterError):
        return None


def _take(line: bytes, trace: EngineTrace) -> bool:
    """Adds the content of a line to the trace. Returns False if it cannot be read."""
    given = _parsed(line)
    try:
        match given:
            case {"request": values}:
                trace.requests.append(_request(values))
            case {"weights": weights}:
                found = _words(weights)
                if trace.header.spec is not None and found:
                    replace(trace.header.spec, weights=found)  # raises SpecError
                trace.weights = found
            case {"cost": values}:
                trace.cost = ObservingCost(**{name: _number(value) for name, value in values.items()})
            case {"note": text}:
                trace.notes.append(_words(text))
            case {"kvcluster_trace": _}:
                pass  # the file was opened again after a failed write
            case _:
                return False
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error, KVClusterError):
        return False
    return True


def _request(values: Mapping[str, Any]) -> ObservedRequest:
    data = base64.b64decode(values["chain"], validate=True)
    if len(data) % HASH_BYTES:
        raise ValueError(f"a chain of {len(data)} bytes, which is no multiple of the {HASH_BYTES} of a hash")
    chain = tuple(data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES))
    computed = tuple((_number(at), _number(blocks)) for at, blocks in values["computed"])
    counts = {name: _number(values[name]) for name in ("at_ns", "prompt_tokens", "asked", "local")}
    rate = _number(values["prefill_tokens_per_s"])
    return ObservedRequest(
        engine=_words(values["engine"]), computed=computed, chain=chain, prefill_tokens_per_s=rate, **counts
    )


def _check_parts(spec: KVSpec | None, parts: Sequence[Part | None]) -> None:
    """Raises SpecError or ValueError unless each part lies in its group."""
    if spec is not None and parts and len(parts) != len(spec.groups):
        raise ValueError(f"{len(parts)} parts of {len(spec.groups)} groups")
    for group, part in enumerate(parts):
        if spec is not None and part is not None:
            spec.check_part(group, part)


def _number(value: Any) -> int:
    """Returns a number of a line. Raises ValueError for one that is none, negative, or beyond what is counted."""
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError("no number from 0 to 2**62")
    return value


def _words(value: Any) -> str:
    """Returns a text of a line as it can be printed: without control characters, and cut to _SAID_CHARS."""
    text = str(value)[:_SAID_CHARS].encode("utf-8", "replace").decode("utf-8")
    return "".join(char if char.isprintable() else "?" for char in text)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):  # UnicodeDecodeError is the former
        return None
    return value if isinstance(value, dict) else None
