"""`eval` of several methods on the same prompts, greedy and sampled: tokens per step by domain.

    python benchmarks/draft_methods.py --draft medusa=file:///runs/medusa/head ... > results.json

EAGLE-3 (the embedded head), prompt lookup and suffix decoding need no `--draft`. Every method is judged by the engine,
as `specdecode-worker eval --concurrency N` does it. The table goes to standard error, after each method.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from machine import described

from specdecode_worker.__main__ import main as command
from specdecode_worker.commands.flags import EMBEDDED_DRAFT

DRAFT_FREE = {"ngram": "prompt lookup", "suffix": "suffix decoding"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draft", action="append", default=[], metavar="METHOD=URI", help="eagle, medusa, draft-model")
    parser.add_argument("--prompts", type=Path, default=Path("benchmarks/prompts/heldout.jsonl"))
    parser.add_argument("--per-domain", type=int, default=4, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--concurrency", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    drafts = {"eagle3": EMBEDDED_DRAFT, **dict(one.split("=", 1) for one in args.draft), **dict.fromkeys(DRAFT_FREE)}
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text(first_of_each_domain(args.prompts, args.per_domain))
        results = {}
        for method, uri in drafts.items():
            results[method] = evaluated(method, uri, prompts, args)
            print(table(results), file=sys.stderr, flush=True)
    settings = {"per_domain": args.per_domain, "max_tokens": args.max_tokens, "concurrency": args.concurrency}
    print(json.dumps({**described(), "settings": settings, "results": results}, indent=1))


def first_of_each_domain(prompts: Path, count: int) -> str:
    """Return the first ``count`` lines of each domain of a prompts file."""
    taken: Counter[str] = Counter()
    lines = []
    for line in prompts.read_text().splitlines():
        domain = json.loads(line)["domain"]
        taken[domain] += 1
        if taken[domain] <= count:
            lines.append(line)
    return "\n".join(lines)


def evaluated(method: str, uri: str | None, prompts: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the document of `eval` for one method."""
    words = ["eval", "--json", "--method", method, "--prompts", str(prompts), "--max-tokens", str(args.max_tokens)]
    words += ["--temperature", args.temperatures, "--concurrency", str(args.concurrency), "--threads", "1"]
    words += [] if uri is None else ["--draft", uri]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = command(words)
    assert code == 0, f"eval of {method} failed"
    document: dict[str, Any] = json.loads(said.getvalue())
    document.pop("draft")  # a path of this machine
    return document


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown table with a row for each method and temperature."""
    domains = sorted(next(iter(results.values()))["runs"][0]["domains"])
    lines = [
        f"| method | temperature | {' | '.join(domains)} | all | speed-up |",
        f"| --- |{' --- |' * (len(domains) + 3)}",
    ]
    for method, document in results.items():
        for run in document["runs"]:
            whole = run["overall"]
            parts = [f"{run['domains'][domain]['tokens_per_step']:.2f}" for domain in domains]
            lines.append(
                f"| {DRAFT_FREE.get(method, method)} | {run['temperature']:g} | {' | '.join(parts)} | "
                f"{whole['tokens_per_step']:.2f} ± {1.96 * whole['standard_error']:.2f} | {whole['speedup']:.2f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
