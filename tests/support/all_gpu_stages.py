"""Command that runs every stage of `make gpu` over the stand-in device, in one process.

    all_stages.py interpreted|other

It prints JSON: {stage: {"rows": [...], "error": the traceback, or ""}}. Stages whose kernels are interpreted run apart
from the others, because Triton either compiles or interprets.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import stage
import stand_in
import torch
from stages import STAGES, TESTS, Run


def main() -> None:
    stand_in.install()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for one in STAGES:
        if one.name != TESTS and one.interpreted == (sys.argv[1] == "interpreted"):
            rows: list[dict[str, Any]] = []
            error = ""
            try:
                rows += ({"stage": one.name, **row} for row in stage.load(one)(Run(torch.device("cpu"), True, 1e9)))
            except Exception:
                error = traceback.format_exc()
            results[one.name] = {"rows": rows, "error": error}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
