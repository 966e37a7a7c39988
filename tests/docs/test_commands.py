"""Every command of README and docs runs, twice, or stands in NOT_RUN with the reason and what runs in its place.

Commands of kvcluster are run in this process against a coordinator and a shard behind real servers. Addresses,
tokens and folders of the pages are replaced by those of the test, and nothing else is.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from kvcluster import KVSpec, connect
from kvcluster.cli.command_parser import CommandParser
from kvcluster.cli.main import main, parser
from tests.cli.served import Served
from tests.cli.test_report import request, write
from tests.docs.snippets import COMMANDS, PAGES, ROOT, snippets_of, text_of, vllm_settings

NOT_RUN = [
    (r"(\w+=\S+ )?vllm serve ", "needs vLLM: tests/vllm/e2e/smoke.py starts engines with these settings"),
    (
        r"(\w+=\S+ )?python -m sglang",
        "needs SGLang and a GPU: tests/engines/sglang/test_contract.py reads settings",
    ),
    (r"(?s)make install .*tools/vllm_env.sh", "needs vLLM, 4 GB: tests/vllm/e2e/smoke.py does the same"),
    (r"serve run ", "needs vLLM beside Ray Serve: tests/vllm/e2e/serve.py runs this application"),
    (r"python examples/prefill_decode_proxy.py ", "needs two vLLM servers: tests/vllm/e2e/prefill.py"),
    (r"kvcluster doctor --engine", "needs vLLM: tests/cli/test_engine_doctor.py, tests/vllm/test_examine.py"),
    (r"pip install|python3 -m venv", "downloads packages: .ci/run installs, tests/compat/releases.py builds wheels"),
    (r"kvcluster token --secret --to", "a second run is refused, as the secret may be in use: tests/cli/test_cli.py"),
    (r"kvcluster .*--ca ", "needs a cluster that speaks TLS: tests/actors/test_tls.py, tests/hosts/test_hosts.py"),
    (r"kvcluster certs ", "a second `init` is refused, as the CA may be in use: tests/cli/test_certs.py"),
    (r"make ", "takes minutes: .ci/run and tools/nightly.py run the targets"),
    (r"\.venv[\w-]*/bin/", "takes minutes, or the other environment: tests/test_nightly.py"),
    (r"python tools/mutants.py ", "takes minutes: tests/test_mutants.py"),
    (r"kubectl |helm |git archive |docker |deploy/kubernetes/prove.sh", "needs Kubernetes: tests/chart/test_prove.py"),
    (r"kvcluster (up --foreground|join) ", "stays in the foreground, on several hosts: tests/hosts/test_hosts.py"),
    (r"kvcluster (up --shards 2|down)", "starts Ray: tests/docs/test_quickstart.py"),
    (r"kvcluster up .*(GiB|10\.0\.0\.5)", "takes gigabytes, a drive or that address: tests/actors/test_background.py"),
    (r"kvcluster drain ", "a shard that is gone stays away: tests/cli/test_admin.py, tests/cli/test_drain_local.py"),
    (r"kvcluster pin .*--tokenizer", "needs a model's tokenizer: tests/cli/test_admin.py makes one"),
    (r"kvcluster events", "waits for events: tests/cli/test_events.py"),
    (r"kvcluster bench ", "measures: tests/cli/test_bench.py, tests/replay/test_trace_replay.py"),
    (r"python -m benchmarks", "takes minutes: tests/benchmarks"),
    (r"python -m tests.sim ", "takes a minute: tests/sim runs seeds, .ci/run 500"),
    (r"curl http://127.0.0.1:9400", "needs a cluster with metrics.port: tests/actors/test_prometheus.py"),
]
"""What begins like this is not run here, and why; and where something runs in its place."""

RUN = {
    " ".join(shlex.split(command, comments=True)): str(snippet.page)
    for snippet, command in COMMANDS
    if not any(re.match(begin, command) for begin, _ in NOT_RUN)
}
"""Every command that is run here, once each, with a page that has it."""

ADDRESS = re.compile(r"\b(HEAD|coordinator|10\.0\.0\.5|127\.0\.0\.1):7070\b")
SPEC = KVSpec.uniform(
    model="llama-3-8b",
    weights="sha256:9f1c",
    num_layers=2,
    num_kv_heads=2,
    head_dim=8,
    dtype="float16",
    block_tokens=16,
)
PROMPT = list(range(64))
MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def served() -> Iterator[Served]:
    with Served("127.0.0.1", host_bytes="8MiB") as served:
        yield served


@pytest.fixture
def folder(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the pages name, in the folder where commands run; and one prompt in the cluster."""
    files = {"prompt.json": json.dumps(PROMPT), "ops.token": "operator", "FILE": "operator"}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    for name in ("traces", "llama-3-8b"):
        (tmp_path / name).mkdir()
    (tmp_path / "llama-3-8b/config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    for engine in ("host:1", "host:2"):
        write(tmp_path / "traces", engine, [request(engine, second, range(8)) for second in range(3)])
    with connect(served.coordinator, SPEC) as client:
        assert client.store(PROMPT, bytes(4 * SPEC.block_bytes)).miss is None and client.flush()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "yes")  # as the person at the terminal says
    return tmp_path


def arguments_of(command: str, served: Served, folder: Path) -> tuple[list[str], str]:
    """Returns the arguments of a command of kvcluster, with the test's address and folder, and the file that its output
    goes to; "" for none."""
    text = ADDRESS.sub(served.coordinator, command).replace("/etc/kvcluster/", f"{folder}/")
    words, *into = re.split(r"\s>>?\s", text)
    _, *arguments = shlex.split(words, comments=True)
    if "--address" in options_of(arguments) and "--address" not in arguments:
        arguments += ["--address", served.coordinator]
    return arguments, into[0].split()[0] if into else ""


@cache
def commands() -> Mapping[str, CommandParser]:
    return parser().subcommands()


def options_of(words: Sequence[str]) -> set[str]:
    """Returns the options of the command whose arguments these are. Raises KeyError if there is no such command."""
    name, *more = words
    command = commands()[name]
    while more and more[0] in command.subcommands():
        command = command.subcommands()[more.pop(0)]
    return {option for action in command._actions for option in action.option_strings}


@pytest.mark.parametrize("command", RUN, ids=[f"{page}: {command}" for command, page in RUN.items()])
def test_a_command_runs_and_can_be_run_again(
    served: Served, folder: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    arguments, into = arguments_of(command, served, folder)
    for _ in range(2):
        status = main(arguments)
        printed = capsys.readouterr()
        assert status == 0 and printed.out, printed.err
        if into:
            Path(folder, into).write_text(printed.out, encoding="utf-8")


def test_what_runs_here_is_kvcluster() -> None:
    assert [command for command in RUN if not command.startswith("kvcluster ")] == []
    assert len(RUN) >= 15


@pytest.mark.parametrize(("begin", "why"), NOT_RUN, ids=[begin for begin, _ in NOT_RUN])
def test_what_is_not_run_is_on_a_page_and_something_runs_in_its_place(begin: str, why: str) -> None:
    chosen = {next((row for row, _ in NOT_RUN if re.match(row, command)), "") for _, command in COMMANDS}
    assert begin in chosen, "no command begins like this any more: remove the row"
    named = re.findall(r"(?:tests|tools|\.ci)/[\w/.]*\w", why)
    assert named and all((ROOT / path).exists() for path in named)


def test_blocks_without_a_language_show_no_commands() -> None:
    programs = re.compile(r"(kvcluster|pip|make|vllm|kubectl|helm|curl|\.venv[\w-]*/bin/\w+) ")
    shown = [str(snippet) for page in PAGES for snippet in snippets_of(page, "") if programs.match(snippet.code)]
    assert shown == [], "give the block the language sh"


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_kvcluster_in_the_text_have_the_options_that_are_named(page: str) -> None:
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    named = [text.replace("\\|", "|") for text in re.findall(r"`kvcluster ([^`]+)`", prose.replace("\n", " "))]
    named += [command.partition("kvcluster ")[2] for _, command in COMMANDS if re.match(r"(\S+/)?kvcluster ", command)]
    for text in named:
        words = re.sub(r"[\[\]|()]", " ", text.partition("#")[0].partition(" -- ")[0]).split()
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert options <= options_of(words), f"{page}: kvcluster {text}"


def test_the_settings_of_engines_are_accepted() -> None:
    configs = [re.search(r"--kv-transfer-config '(\{.*?\})'", command, re.DOTALL) for _, command in COMMANDS]
    given = [json.loads(config[1]) for config in configs if config]
    ours = [config for config in given if config["kv_connector"] == "KVClusterConnector"]
    assert len(ours) >= 6
    read = vllm_settings().parse_settings
    for config in ours:
        assert config["kv_connector_module_path"] == "kvcluster.engines.vllm"
        assert config["kv_load_failure_policy"] == "recompute"
        read(config["kv_connector_extra_config"])


def test_what_is_made_and_installed_exists() -> None:
    makefile, project = text_of("Makefile"), text_of("pyproject.toml")
    pages = "\n".join(map(text_of, PAGES))
    assert [name for name in re.findall(r"`?make ([a-z][a-z0-9-]+)`", pages) if f"\n{name}:" not in makefile] == []
    code = "\n".join(command for _, command in COMMANDS)
    for name in re.findall(r"^make ([a-z0-9-]+)", code, re.MULTILINE):
        assert f"\n{name}:" in makefile
    for extra in {extra for extras in re.findall(r"kvcluster\[([\w,-]+)\]", pages) for extra in extras.split(",")}:
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), f"there is no extra {extra}"
