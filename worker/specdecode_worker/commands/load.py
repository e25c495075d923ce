"""Command ``load``: send open-loop load to a running server and summarise the outcome of the requests."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx

from specdecode_worker.load_generator.run import LoadRun, LoadTarget, summary
from specdecode_worker.load_generator.schedule import ClientBehaviour, Profile

QUESTIONS = (
    "Write a Python function that returns the factorial of n.",
    "What is the capital of France, and what is it known for?",
    "Tell a short story about a lighthouse keeper and a storm.",
    "List five reasons to plant a tree. " * 4,
    "Write a SQL query that counts the orders of each customer.",
    "Explain how a bicycle stays upright. " * 9,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command to ``parser``."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rate", type=_range(float), default=(1.0, 8.0), metavar="LOW:HIGH", help="requests a second")
    parser.add_argument("--max-tokens", type=_range(int), default=(4, 64), metavar="LOW:HIGH")
    parser.add_argument("--max-concurrency", type=int, default=64, help="clients that are there at once, at most")
    parser.add_argument("--timeout", type=float, default=120, help="seconds that a client waits")
    parser.add_argument("--disconnect", type=float, default=0.0, metavar="SHARE", help="clients that hang up")
    parser.add_argument("--oversized", type=float, default=0.0, metavar="SHARE", help="requests that cannot fit")
    parser.add_argument("--garbage", type=float, default=0.0, metavar="SHARE", help="bodies that are no JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", metavar="FILE.jsonl", help='lines of {"messages": [...]} or {"prompt": "..."}')
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")


def run(args: argparse.Namespace) -> int:
    """Return the exit code: 1 if a request failed or equal requests received different texts, else 0."""
    shares = {ClientBehaviour(name): getattr(args, name) for name in ("disconnect", "oversized", "garbage")}
    profile = Profile(seconds=args.seconds, rate=args.rate, max_tokens=args.max_tokens, shares=shares)
    try:
        report = asyncio.run(_run(args, profile))
    except (httpx.HTTPError, ValueError, OSError, KeyError) as error:
        print(f"specdecode-worker load: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report, indent=2) if args.json else _table(report))
    return 1 if report["failed"] or report["differing_texts"] else 0


async def _run(args: argparse.Namespace, profile: Profile) -> dict[str, Any]:
    """Send the load of ``profile`` and return the summary."""
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    async with httpx.AsyncClient(base_url=args.url, headers=headers, trust_env=False) as client:
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]
    target = LoadTarget(
        url=args.url,
        model=model["id"],
        prompts=_prompts(args.prompts),
        oversized_max_tokens=model.get("max_model_len", 1 << 20) + 1,
        api_key=args.api_key,
    )
    load_run = LoadRun(target, args.max_concurrency, args.timeout)
    return summary(load_run, await load_run.send(profile, args.seed))


def _prompts(path: str | None) -> tuple[str, ...]:
    """Read prompts from a file, the last message of each chat; return built-in questions if ``path`` is None."""
    if path is None:
        return QUESTIONS
    lines = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    return tuple(line["prompt"] if "prompt" in line else line["messages"][-1]["content"] for line in lines)


def _range(kind: type[int] | type[float]) -> Any:
    """Return a parser of ``LOW:HIGH`` for argparse; a single number gives both limits."""

    def read(text: str) -> tuple[Any, Any]:
        low, _, high = text.partition(":")
        limits = kind(low), kind(high or low)
        if not 0 < limits[0] <= limits[1]:
            raise argparse.ArgumentTypeError(f"{text!r} is no range; write LOW:HIGH")
        return limits

    return read


def _table(report: dict[str, Any]) -> str:
    """Format the summary as lines of name and value."""
    return "\n".join(f"{name.replace('_', ' '):26} {value}" for name, value in report.items())
