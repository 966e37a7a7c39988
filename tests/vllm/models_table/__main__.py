"""`python -m tests.vllm.models_table`: examines all architectures, or those that are named, and writes what came of it.

`--pages` examines nothing and writes the pages of the saved result again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")

from tests.vllm.models_table import page

LATER = Path("build/vllm-0.33.0/vllm/model_executor/models/registry.py")


def main() -> int:
    """Examines, and writes; of named architectures it prints what it finds, and writes only with --keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], help="these architectures, and print what is found of them")
    parser.add_argument("--checkpoints", action="store_true", help="only the checkpoints, into the saved result")
    parser.add_argument("--keep", action="store_true", help="with --only: put them into the saved result")
    parser.add_argument("-v", action="store_true", help="print where an examination failed")
    parser.add_argument("--pages", action="store_true", help="write the pages of the saved result")
    options = parser.parse_args()
    if options.pages:
        page.write(page.saved())
        return 0
    from tests.vllm.models_table import examine, walk

    examine.prepare()
    began = time.monotonic()
    generative, drafts = walk.architectures()
    checkpoints = {}
    for name in [] if options.only else page.checkpoint_names():
        content = page.checkpoint(name)
        checkpoints[name] = walk.examined(content["architectures"][0], content)
        print(f"{name}: {page.summary(checkpoints[name])}", flush=True)
    if options.checkpoints:
        _put({"checkpoints": checkpoints})
        return 0
    rows = {}
    for name in options.only or generative:
        rows[name] = walk.examined(name)
        print(f"{name}: {json.dumps(rows[name]) if options.only else page.summary(rows[name])}", flush=True)
    if options.only and not options.keep:
        return 0
    if options.only:
        result: dict[str, Any] = {"rows": page.saved()["rows"] | rows}
    else:
        later = [name for name in walk.later_architectures(LATER) if name not in generative] if LATER.exists() else []
        result = {"vllm": examine.release(), "transformers": examine.transformers_release(), "drafts": len(drafts)}
        result |= {"minutes": round((time.monotonic() - began) / 60), "later": later, "rows": rows}
        result |= {"checkpoints": checkpoints}
    _put(result)
    return 0


def _put(new: dict[str, Any]) -> None:
    """Puts these parts into the saved result, and writes the pages."""
    result = (page.saved() if page.RESULT.exists() else {}) | new
    page.save(result)
    page.write(result)
    print("\n".join(page.shares(result)))


if __name__ == "__main__":
    sys.exit(main())
