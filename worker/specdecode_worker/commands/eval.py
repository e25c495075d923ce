"""Command ``eval``: measure the acceptance of a draft by domain, depth and context, before it is deployed.

The engine answers with and without the draft (commands/comparison.py).
"""

from __future__ import annotations

import argparse
import json
import sys

from specdecode_worker.commands.comparison import evaluate_on_engine, table
from specdecode_worker.commands.flags import method_and_draft
from specdecode_worker.models.errors import ModelError
from specdecode_worker.training.errors import TrainingError


def run(args: argparse.Namespace) -> int:
    """Return the exit code: 0 with the results on standard output, 1 on an error, 2 for wrong usage."""
    try:
        method, _ = method_and_draft(args)
        if method == "none" or not args.prompts:
            raise ValueError("eval needs a draft and --prompts FILE.jsonl")
    except ValueError as error:
        print(f"specdecode-worker eval: {error}", file=sys.stderr)
        return 2
    try:
        document = evaluate_on_engine(args)
    except (ModelError, TrainingError, OSError, ValueError) as error:
        print(f"specdecode-worker eval: {error}", file=sys.stderr)
        return 1
    print(json.dumps(document, indent=2) if args.json else table(document))
    return 0
