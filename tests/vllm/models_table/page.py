"""The saved result of the examination, and what is written from it: docs/models.md and kvcluster/core/architectures.py.

Needs no vLLM.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvcluster.core.model_kinds import TRAITS
from kvcluster.core.model_outcome import (
    CONTRACT,
    PROVED,
    REFUSED,
    UNKNOWN,
    ExaminedArchitectures,
    model_outcome,
    served_outcome,
)

ROOT = Path(__file__).parents[3]
RESULT = Path(__file__).parent / "result.json"
PAGE = ROOT / "docs" / "models.md"
MODULE = ROOT / "kvcluster" / "core" / "architectures.py"
CHECKPOINTS = ROOT / "tests" / "vllm" / "checkpoints"

_NOT_EXAMINED = "not examined"
_OUTCOMES = (PROVED, CONTRACT, REFUSED, _NOT_EXAMINED)
_GROUP = re.compile(r"^group \d+ ")


def saved() -> dict[str, Any]:
    """Returns the saved result."""
    return dict(json.loads(RESULT.read_text(encoding="utf-8")))


def save(result: Mapping[str, Any]) -> None:
    """Saves a result, a line for each architecture and checkpoint."""
    lines = []
    for name, value in result.items():
        if isinstance(value, dict):
            rows = ",\n".join(f"  {json.dumps(each)}: {json.dumps(value[each])}" for each in sorted(value))
            lines.append(f"{json.dumps(name)}: {{\n{rows}\n}}")
        else:
            lines.append(f"{json.dumps(name)}: {json.dumps(value)}")
    RESULT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def write(result: Mapping[str, Any]) -> None:
    """Writes the page and the module."""
    MODULE.write_text(module_text(result), encoding="utf-8")
    PAGE.write_text(page_text(result), encoding="utf-8")


def outcome(row: Mapping[str, Any]) -> str:
    """Returns the outcome of an examined architecture or checkpoint."""
    if "error" in row:
        return _NOT_EXAMINED
    return REFUSED if row["refused"] else served_outcome(row["traits"])


def reason(row: Mapping[str, Any]) -> str:
    """Returns why a row is refused: each different reason once, without the number of its group."""
    return "; ".join(dict.fromkeys(_GROUP.sub("a group ", each) for each in row["refused"]))


def summary(row: Mapping[str, Any]) -> str:
    """Returns a row in a line."""
    said = row["error"] if "error" in row else reason(row) or ", ".join(row["traits"])
    return f"{outcome(row)}: {said}"


# ------------------------------------------------------------------------------------------------- the module


def known_of(result: Mapping[str, Any]) -> ExaminedArchitectures:
    """Returns what `kvcluster doctor --model` is to know."""
    served: dict[tuple[str, ...], list[str]] = {}
    refused: dict[tuple[tuple[str, ...], str], list[str]] = {}
    missed = [*result["later"]]
    for name, row in sorted(result["rows"].items()):
        if "error" in row:
            missed.append(name)
        elif row["refused"]:
            refused.setdefault((tuple(row["traits"]), reason(row)), []).append(name)
        else:
            served.setdefault(tuple(row["traits"]), []).append(name)
    known = ExaminedArchitectures(
        tuple((traits, " ".join(names)) for traits, names in sorted(served.items())),
        tuple((traits, why, " ".join(names)) for (traits, why), names in sorted(refused.items())),
        "",
        " ".join(sorted(missed)),
    )
    unread = [name for names in served.values() for name in names if _is_misread(result["rows"][name], known)]
    return ExaminedArchitectures(known.served, known.refused, " ".join(sorted(unread)), known.not_examined)


def _is_misread(row: Mapping[str, Any], known: ExaminedArchitectures) -> bool:
    """Whether config.json is understood, and says something else than the layers of vLLM's model."""
    found = model_outcome(row["config"], known)
    if not found.is_served:
        return False
    return (found.token_bytes, list(found.kinds)) != (row["token_bytes"], row["traits"])


def module_text(result: Mapping[str, Any]) -> str:
    """Returns the source of kvcluster/core/architectures.py."""
    known = known_of(result)
    lines = [
        f'"""Which KV the generative architectures of vLLM {result["vllm"]} keep: found over its own objects.',
        "",
        "Written by `make models` (tests/vllm/models_table); docs/models.md shows it. The fields are those of",
        "model_outcome.ExaminedArchitectures.",
        '"""',
        "",
        f'RELEASE = "{result["vllm"]}"',
        "SERVED: tuple[tuple[tuple[str, ...], str], ...] = (",
    ]
    for traits, names in known.served:
        lines += ["    (", f"        {_tuple_text(traits)},", *_names_text(names, "        "), "    ),"]
    lines += [")", "REFUSED: tuple[tuple[tuple[str, ...], str, str], ...] = ("]
    for traits, why, names in known.refused:
        lines += [
            "    (",
            f"        {_tuple_text(traits)},",
            *_sentence(why),
            *_names_text(names, "        "),
            "    ),",
        ]
    lines += [")", *_names_text(known.unread, "", "UNREAD = "), *_names_text(known.not_examined, "", "NOT_EXAMINED = ")]
    return "\n".join(lines) + "\n"


def _tuple_text(traits: Iterable[str]) -> str:
    texts = [json.dumps(trait) for trait in traits]
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"


def _sentence(text: str) -> list[str]:
    parts = textwrap.wrap(text, 90, drop_whitespace=False)
    if len(parts) == 1:
        return [f"        {json.dumps(text)},"]
    return [*(f"        {json.dumps(part)}" for part in parts[:-1]), f"        {json.dumps(parts[-1])},"]


def _names_text(names: str, indent: str, before: str = "") -> list[str]:
    comma = "" if before else ","
    if not names:
        return [f'{indent}{before}""{comma}']
    lines = textwrap.wrap(names, 110, initial_indent="    ", subsequent_indent="    ")
    return [f'{indent}{before}"""', *lines, f'{indent}"""{comma}']


# --------------------------------------------------------------------------------------------------- the page


def shares(result: Mapping[str, Any]) -> list[str]:
    """Returns the shares as lines: proved, by contract, refused by what is missing, not examined."""
    rows = result["rows"].values()
    total = len(result["rows"]) + len(result["later"])
    counts = Counter(outcome(row) for row in rows)
    counts[_NOT_EXAMINED] += len(result["later"])
    named = {PROVED: "of kinds that a real engine proves", CONTRACT: "by contract"}
    return [f"{counts[each]} of {total} ({counts[each] / total:.0%}): {named.get(each, each)}" for each in _OUTCOMES]


def missing(result: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Returns what refused architectures need, and how many need it, the most needed first."""
    rows = [row for row in result["rows"].values() if "error" not in row]
    accepted = {trait for row in rows if not row["refused"] for trait in row["traits"]}
    needed: Counter[str] = Counter()
    for row in rows:
        if row["refused"]:
            needed.update([trait for trait in row["traits"] if trait not in accepted] or [reason(row)])
    return sorted(needed.items(), key=lambda item: (-item[1], item[0]))


def page_text(result: Mapping[str, Any]) -> str:
    """Returns docs/models.md."""
    return "\n".join([*_introduction(result), *_kinds(result), *_checkpoints(result), *_architectures(result)]) + "\n"


_INTRODUCTION = """\
# Which models

What [the connector for vLLM](vllm.md) serves, for every generative architecture in the registry of vLLM {vllm}. This
page is written by `make models` ({minutes} minutes on two cores): it builds each model from a small configuration on
torch's meta device, asks the layers that vLLM made for their KV, has vLLM group them, and asks the connector what it
refuses. `kvcluster doctor --model PATH` says the same of a checkpoint's folder, from its config.json, without vLLM;
`kvcluster doctor --engine vllm --model PATH` asks the installed vLLM.

- **{proved}**: the connector accepts the model, and for each kind of KV that it keeps a real engine answers with the
  cache as without it, to the last bit (`make e2e-vllm`, on CPUs). The checks run a model of each kind, not each model.
- **{contract}**: the connector accepts what vLLM's own objects say of the model, and no real engine with this kind of
  KV has been compared.
- **{refused}**: an engine with this connector does not start, and says why.
- **{not_examined}**: the model could not be built here; nothing is claimed.

An architecture stands here with one configuration. A checkpoint's own may keep less or more, which is why the doctor
reads it. Configurations are the defaults of transformers {transformers} or of vLLM with eight layers, or written by
hand (`tests/vllm/models_table/written.py`). Empty modules stand for absent libraries of images and of GPU kernels.
"""

_DRAFTS = """
The registry's {drafts} draft models (speculators) have no row: each is refused with the model that it speculates for
(a group "belongs to a draft model"). Pooling models are not examined: they generate nothing.
"""


def _introduction(result: Mapping[str, Any]) -> Iterator[str]:
    about = {"vllm": result["vllm"], "transformers": result["transformers"], "minutes": max(1, result["minutes"])}
    outcomes = {"proved": PROVED, "contract": CONTRACT, "refused": REFUSED, "not_examined": _NOT_EXAMINED}
    yield _INTRODUCTION.format(**about, **outcomes)
    yield from ("| outcome | architectures |", "|---|---|")
    for line in shares(result):
        share, _, what = line.partition(": ")
        yield f"| {what} | {share} |"
    yield from ("", "What the refused lack, the most needed first (one may lack several):", "")
    yield from ("| missing | architectures |", "|---|---|")
    for what, count in missing(result):
        yield f"| {_cell(what)} | {count} |"
    yield _DRAFTS.format(drafts=result["drafts"])


def _kinds(result: Mapping[str, Any]) -> Iterator[str]:
    counts = Counter(trait for row in result["rows"].values() for trait in row.get("traits", ()))
    yield from ("## Kinds of KV", "", "| kind | what a model keeps | architectures | proved by |", "|---|---|---|---|")
    for name, trait in TRAITS.items():
        proved = f'`make e2e-vllm E2E_ARGS="--only {trait.proved_by}"`' if trait.proved_by else ""
        yield f"| {name} | {trait.about} | {counts[name] or ''} | {proved} |"
    yield ""


_CHECKPOINTS = """\
## Checkpoints

Examined in the same way with all their layers, from the fields of their published config.json
([sources](../tests/vllm/checkpoints/README.md)). KiB are those of a token in all layers and heads.

| checkpoint | architecture | kinds of KV | outcome | KiB a token | `doctor --model` |
|---|---|---|---|---|---|"""


def _checkpoints(result: Mapping[str, Any]) -> Iterator[str]:
    yield _CHECKPOINTS
    known = known_of(result)
    for name, row in sorted(result["checkpoints"].items(), key=lambda item: item[0].lower()):
        config = checkpoint(name)
        found = model_outcome(config, known)
        size = f"{row['token_bytes'] / 1024:,.1f}" if row.get("token_bytes") else ""
        traits = ", ".join(row.get("traits", ()))
        yield f"| {name} | {config['architectures'][0]} | {traits} | {_outcome_text(row)} | {size} | {_told(found)} |"
    yield ""


def _told(found: Any) -> str:
    return f"{found.outcome}: {found.why}" if found.outcome == UNKNOWN else str(found.outcome)


def _outcome_text(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return f"{_NOT_EXAMINED}: {_cell(row['error'])}"
    return f"{REFUSED}: {_cell(reason(row))}" if row["refused"] else outcome(row)


def checkpoint(name: str) -> dict[str, Any]:
    """Returns the config.json of a named checkpoint."""
    return dict(json.loads((CHECKPOINTS / f"{name}.json").read_text(encoding="utf-8")))


def checkpoint_names() -> list[str]:
    """Returns the names of the checkpoints whose config.json is here."""
    return sorted(path.stem for path in CHECKPOINTS.glob("*.json"))


def _architectures(result: Mapping[str, Any]) -> Iterator[str]:
    yield from ("## Architectures", "", "| architecture | kinds of KV | outcome | configuration |", "|---|---|---|---|")
    rows = result["rows"] | {
        name: {"error": "of a later release alone, whose wheel is for GPUs"} for name in result["later"]
    }
    for name, row in sorted(rows.items(), key=lambda item: item[0].lower()):
        source = "; ".join(filter(None, (row.get("source", ""), _cell(row.get("note", "")))))
        yield f"| {name} | {', '.join(row.get('traits', ()))} | {_outcome_text(row)} | {source} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
