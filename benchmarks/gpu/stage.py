"""One stage, in a process of its own: `stage.py NAME PART.jsonl RATE [--dry-run]`. A line of PART is a row."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from given import Run
from stages import STAGES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[stage.name for stage in STAGES])
    parser.add_argument("part", type=Path)
    parser.add_argument("rate", type=float)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    stage = next(stage for stage in STAGES if stage.name == args.name)
    device = torch.device("cpu" if args.dry_run else "cuda")
    with args.part.open("a") as out:
        for row in stage.run(Run(device, args.dry_run, args.rate)):
            out.write(json.dumps({"stage": stage.name, **row}) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
