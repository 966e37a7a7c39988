"""If engines of one model do not share, the field that differs is named; intended differences are not."""

from __future__ import annotations

from dataclasses import replace

from kvcluster.cli.weights import kept_apart
from kvcluster.core.messages import GetNamespaces, Namespaces
from kvcluster.replay.core_stepper import build_request
from tests.client.build import SPEC, spec_of
from tests.core.lone_coordinator import BLOCKS, LoneCoordinator
from tests.core.samples import OURS, THEIRS, pages
from tests.core.samples import SPEC as WORLD_SPEC

LONG = "sha256:" + "a" * 64


def test_the_field_that_differs_is_named_with_both_values() -> None:
    other = spec_of(weights=LONG)
    assert list(kept_apart([(SPEC, 7), (other, 3)])) == [
        f"tiny: 3 blocks cannot be shared with 7 others; different weights ({LONG[:40]}..., not sha256:1)"
    ]


def test_the_fullest_namespace_is_the_one_that_others_are_apart_from() -> None:
    [line] = kept_apart([(SPEC, 3), (spec_of(weights="sha256:2"), 1_000)])
    assert line.startswith(
        "tiny: 3 blocks cannot be shared with 1,000 others; different weights (sha256:1, not sha256:2)"
    )


def test_settings_are_named_one_by_one() -> None:
    mine = replace(SPEC, extra=(("config", "sha256:1"), ("engine", "vllm-0.32")))
    theirs = replace(SPEC, extra=(("config", "sha256:1"), ("engine", "vllm-0.33")))
    [line] = kept_apart([(mine, 7), (theirs, 3)])
    assert line.endswith("different engine (vllm-0.33, not vllm-0.32)")


def test_number_formats_and_layouts_are_told_apart() -> None:
    lines = list(kept_apart([(SPEC, 7), (spec_of(dtype="bfloat16"), 3), (spec_of(num_layers=9), 2)]))
    assert lines[0].endswith("different dtype (bfloat16, not float32)")
    assert lines[1].find("different layout of layers and heads (") > 0


def test_adapters_and_other_models_are_meant_to_be_apart() -> None:
    assert list(kept_apart([(SPEC, 7), (replace(SPEC, adapter="sha256:9"), 3), (spec_of(model="other"), 3)])) == []


def test_namespaces_that_a_purge_has_emptied_are_no_difference() -> None:
    emptied = [(spec_of(weights=f"sha256:{number}"), 0) for number in range(2, 5)]
    assert list(kept_apart(emptied)) == []
    assert list(kept_apart([(SPEC, 7), *emptied])) == []


def test_a_tenant_is_told_of_its_own_namespaces_alone() -> None:
    coordinator, _ = LoneCoordinator.serving(*pages(BLOCKS[:2]))
    assert coordinator.ask(Namespaces, build_request(GetNamespaces(), OURS)).known == ((WORLD_SPEC, 2),)
    assert coordinator.ask(Namespaces, build_request(GetNamespaces(), THEIRS)).known == ((WORLD_SPEC, 0),)
