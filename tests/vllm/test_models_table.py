"""A sample of docs/models.md is examined again over vLLM's own objects: `make models` examines all."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.vllm.models_table import page

SAMPLE = ("LlamaForCausalLM", "Gemma3ForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM", "JambaForCausalLM")
"""Full attention, windows, latents, sinks, and a hybrid that is refused."""


def test_five_architectures_keep_what_the_saved_result_says() -> None:
    command = [sys.executable, "-m", "tests.vllm.models_table", "--only", *SAMPLE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=page.ROOT, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(": ", maxsplit=1) for line in done.stdout.splitlines() if line.startswith(SAMPLE))
    saved = page.saved()["rows"]
    assert {name: json.loads(lines[name]) for name in SAMPLE} == {name: saved[name] for name in SAMPLE}
