"""Claims about the project itself: what it installs, what importing it costs, what its checks catch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kvcluster
from tools import glossary, structure, tidy
from tools.structure import Known

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BASE = [Requirement(line) for line in PROJECT["dependencies"]]
HEAVY = ("ray", "torch", "transformers", "rich", "numpy")


def test_the_base_install_is_the_light_client() -> None:
    assert {r.name for r in BASE} == {"grpcio", "protobuf", "xxhash", "tomli"}


def test_protobuf_may_be_any_that_vllm_admits() -> None:
    protobuf = next(r for r in BASE if r.name == "protobuf")
    assert all(protobuf.specifier.contains(version) for version in ("5.29.6", "6.33.5", "7.36.2"))


def test_generated_messages_ask_nothing_of_the_protobuf_runtime() -> None:
    generated = sorted((ROOT / "kvcluster/wire/v1").glob("*_pb2.py"))
    assert generated
    asking = [path.name for path in generated if "runtime_version" in path.read_text(encoding="utf-8")]
    assert not asking, f"{asking} were made by a compiler of 5.27 or later; see docs/adr/0002 and run make proto"


def test_kvcluster_imports_where_only_the_base_install_is() -> None:
    # A name that maps to None in sys.modules cannot be imported, as if it were not installed.
    code = f"""
import sys
sys.modules.update(dict.fromkeys({HEAVY!r}))
import kvcluster
print(kvcluster.__version__, kvcluster.KVSpec.__name__, callable(kvcluster.connect))
"""
    assert _python(code) == f"{kvcluster.__version__} KVSpec True"


def test_importing_kvcluster_leaves_heavy_packages_alone() -> None:
    # Here they are installed: a module that imports one where it can would go unseen by the test above.
    use = "import sys, kvcluster; kvcluster.connect; kvcluster.KVSpec"
    assert _python(f"{use}; print(*(m for m in {HEAVY!r} if m in sys.modules))") == ""


def test_make_installs_pinned_versions_of_everything_asked_for_by_their_hashes() -> None:
    entries = re.split(r"\n(?=\w)", (ROOT / "requirements.lock").read_text(encoding="utf-8"))[1:]
    assert len(entries) > 100 and all("--hash=sha256:" in entry for entry in entries)
    pins = [Requirement(entry.split("\\", 1)[0]) for entry in entries] + [Requirement("torch==2.13.0")]
    assert all(re.fullmatch(r"==[^*]+", str(pin.specifier)) for pin in pins)
    pinned = {canonicalize_name(pin.name): pin for pin in pins if pin.marker is None or pin.marker.evaluate()}
    extras = [Requirement(line) for group in PROJECT["optional-dependencies"].values() for line in group]
    for wanted in [r for r in BASE if r.marker is None] + extras:
        version = str(pinned[canonicalize_name(wanted.name)].specifier).removeprefix("==")
        assert wanted.specifier.contains(version), f"{wanted} is pinned to {version}"


@pytest.mark.parametrize(
    ("path", "text", "complaint"),
    [
        ("kvcluster/x.py", "# TO" + "DO later\n", "finish it"),
        ("tests/test_x.py", "@pytest.mark.sk" + "ip\n", "finish it"),
        ("kvcluster/x.py", "x = 1\n" * 501, "501 lines"),
        ("tests/test_x.py", "time.sle" + "ep(1)\n", "sleeps"),
        ("docs/x.md", "see /ho" + "me/me/x\n", "one machine"),
        ("kvcluster/x.py", "lease_ttl: " + "int = 3\n", "without its unit"),
        ("kvcluster/core/x.py", "import random\n", "random comes in"),
        ("kvcluster/core/x.py", "from random import Random\n", "random comes in"),
        ("kvcluster/core/x.py", "x = hash('a')\n", "hash() differs"),
        ("kvcluster/core/x.py", "x = [y for y in set(z)]\n", "order of a set"),
        ("docs/x.md", "[here](gone.md#part)\n", "gone.md does not exist"),
        ("docs/x.md", "see `runtime/gone.py`\n", "runtime/gone.py does not exist"),
        ("README.md", "make demo\n", "does not show `make test`"),
        ("docs/adr/0001-x.md", "\n" * 41, "41 lines"),
        ("docs/adr/0002-x.md", "# x\n", "missing from docs/adr/README.md"),
        ("docs/adr/0001-y.md", "# y\n", "same number"),
    ],
)
def test_tidy_names_what_is_wrong_and_where(tmp_path: Path, path: str, text: str, complaint: str) -> None:
    tidy_tree = {
        "README.md": "make demo, make test, [decisions](docs/adr/README.md)\n",
        "docs/adr/README.md": "[one](0001-x.md)\n",
        "docs/adr/0001-x.md": "# x\n",
        "kvcluster/core/y.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from random import Random\n",
        "kvcluster/x_pb2.py": "# TO" + "DO generated\n",
    }
    _write(tmp_path, tidy_tree)
    assert tidy.complaints(tmp_path, Known()) == []
    _write(tmp_path, {path: text})
    found = tidy.complaints(tmp_path, Known())
    assert any(c.startswith(f"{path}:") and complaint in c for c in found), found


LONG = "def f():\n" + "    pass\n" * 50
LATER = "def f():\n    from kvcluster.a import g\n"
TYPED = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvcluster.a import G\n"


@pytest.mark.parametrize(
    ("modules", "known", "complaint"),
    [
        ({"a": "import kvcluster.b\n", "b": "import kvcluster.a\n"}, "circles", "a circle of imports: kvcluster.a"),
        ({"a": "from kvcluster import b\n", "b": LATER}, "circles", "a circle of imports: kvcluster.a, kvcluster.b;"),
        ({"a": "from kvcluster.b import h\n", "b": TYPED}, "circles", "a circle of imports: kvcluster.a"),
        (
            {"p/__init__": "from kvcluster.p.a import g\n", "p/a": "from kvcluster.p import b\n", "p/b": ""},
            "circles",
            "a circle of imports: kvcluster.p, kvcluster.p.a;",
        ),
        ({"a": LONG}, "functions", "f has 51 lines, more than 50"),
        ({"a": "class C:\n    async " + LONG.replace("\n", "\n    ")}, "functions", "f has 51 lines, more than 50"),
        ({"a": "class _C: ...\n", "b": "class _C: ...\n"}, "classes", "a class _C is also in kvcluster/b.py:1"),
    ],
)
def test_the_shape_of_modules_is_held_but_for_what_is_known(
    modules: dict[str, str], known: str, complaint: str
) -> None:
    texts = {f"kvcluster/{name}.py": text for name, text in modules.items()}
    found = structure.complaints(texts, Known())
    assert found[0].startswith("kvcluster/") and complaint in found[0]
    excepted = {"circles": "kvcluster", "functions": "kvcluster/a.py:f", "classes": "_C"}[known]
    assert structure.complaints(texts, Known(**{known: (excepted,)})) == []


@pytest.mark.parametrize("known", ["circles", "functions", "classes"])
def test_an_exception_that_is_not_needed_any_more_is_a_complaint(known: str) -> None:
    texts = {"kvcluster/a.py": "import kvcluster.b\nclass C: ...\n" + LONG.replace("    pass\n", "", 1), "x.py": LONG}
    assert structure.complaints(texts, Known()) == []
    excepted = {"circles": "kvcluster", "functions": "kvcluster/a.py:f", "classes": "C"}[known]
    (complaint,) = structure.complaints(texts, Known(**{known: (excepted,)}))
    assert complaint.startswith("tools/structure.py:1: ") and "take it out of KNOWN" in complaint


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("| **pin lease, grant** | Ends at `ends_at`, as `Renewed` or `late`; see `core/shard/leases.py`. |", None),
        ("| **renew** | Another form of a word is that word: renewed. |", None),
        ("| **loan** | A pin lease. |", "no module of kvcluster uses 'loan'"),
        ("| **grant** | Of a **loan**. |", "no module of kvcluster uses 'loan'"),
        ("| **lease of pins** | A pin lease. |", "no module of kvcluster uses 'lease of pins'"),
        ("| **grant** | It is given. |\n| **pin lease, grant** | It too. |", "'grant' is explained in line 1 as well"),
        ("| **grant** | Ends at `begins_at`. |", "`begins_at` is no name"),
        ("| **grant** | Written of in `prose` only. |", "`prose` is no name"),
        ("| **grant** | See `core/loans.py`. |", "`core/loans.py` is no name"),
    ],
)
def test_the_glossary_is_held_to_the_code(row: str, complaint: str | None) -> None:
    module = '"""A prose of grants."""\nclass PinLease:\n    ends_at: int\ndef renewed(x: "late") -> None: ...\n'
    found = glossary.complaints(
        {"docs/glossary.md": row, "kvcluster/core/shard/leases.py": module, "x.py": "loan = 1\n"}
    )
    assert [c for c in found if complaint is None or complaint not in c] == [], found
    assert bool(found) == (complaint is not None)


@pytest.mark.parametrize(("lines", "branches", "thin"), [(95, 95, []), (94, 100, ["lines"]), (100, 94, ["branches"])])
def test_lines_do_not_make_up_for_branches(tmp_path: Path, lines: int, branches: int, thin: list[str]) -> None:
    totals = {"covered_lines": lines, "num_statements": 100, "covered_branches": branches, "num_branches": 100}
    report = tmp_path / "coverage.json"
    report.write_text(json.dumps({"totals": totals}), encoding="utf-8")
    assert [complaint.split()[3] for complaint in tidy.thin_coverage(report)] == thin


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _write(root: Path, texts: dict[str, str]) -> None:
    for path, text in texts.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
