"""One stage, in a process of its own: `stage.py NAME PART.jsonl RATE [--dry-run]`. A line of PART is a row."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from stages import STAGES, Run, Stage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[stage.name for stage in STAGES])
    parser.add_argument("part", type=Path)
    parser.add_argument("rate", type=float)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    if args.dry_run:
        import stand_in

        stand_in.install()
    stage = next(stage for stage in STAGES if stage.name == args.name)
    device = torch.device("cpu" if args.dry_run else "cuda")
    with args.part.open("a") as out:
        for row in load(stage)(Run(device, args.dry_run, args.rate)):
            out.write(json.dumps({"stage": stage.name, **row}) + "\n")
            out.flush()


def load(stage: Stage) -> Callable[[Run], Iterator[dict[str, Any]]]:
    """The function of a stage."""
    module, _, function = stage.function.partition(".")
    found: Callable[[Run], Iterator[dict[str, Any]]] = getattr(importlib.import_module(f"stages.{module}"), function)
    return found


if __name__ == "__main__":
    main()
