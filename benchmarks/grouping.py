"""Does it pay to run tasks in steps of their own? A step of n requests that draft and n that do not, packed together,
against a step of each kind after the other: the same tokens come out, since shapes are per request either way.

    .venv/bin/python benchmarks/grouping.py --dtype bfloat16 --out benchmarks/results/grouping-cpu
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from machine import described

from specdecode_worker.commands.bench import QUESTIONS
from specdecode_worker.commands.flags import add_model_flags
from specdecode_worker.commands.local_engine import LocalEngine, local_engine
from specdecode_worker.contract import Plan, PlanRow, TaskMatch, TreeShape
from specdecode_worker.core.messages import Submit
from specdecode_worker.sampling.params import Sampling

PLAIN = TreeShape(())


def main() -> int:
    args = _arguments()
    engine = local_engine(args, max_num_seqs=2 * max(args.concurrency))
    engine.engine.set_plan(_plan(engine, TreeShape.parse(args.shape)))
    rows = [_row(engine, count, args) for count in args.concurrency]
    print("each   drafting ms   plain ms   packed ms   separate / packed")
    for row in rows:
        print(f"{row['each']:4}   {row['drafting']:11.1f}   {row['plain']:8.1f}   {row['packed']:9.1f}", end="   ")
        print(f"{row['apart_over_packed']:17.2f}")
    if args.out:
        document = {**described(), "dtype": args.dtype, "model": args.model, "shape": args.shape, "rows": rows}
        Path(args.out).with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=24, help="timed a run")
    parser.add_argument("--shape", default="chain:3", help="of the requests that draft")
    parser.add_argument("--out", metavar="STEM")
    add_model_flags(parser)
    return parser.parse_args()


def _plan(engine: LocalEngine, shape: TreeShape) -> Plan:
    edges = len(Plan(draft="d", version=1).buckets.concurrency) + 1
    kinds = (("drafting", shape), ("plain", PLAIN))
    return Plan(
        draft=engine.engine.draft.hash,
        version=1,
        rows=tuple(
            PlanRow(concurrency=bucket, context=0, task=name, shape=each)
            for bucket in range(edges)
            for name, each in kinds
        ),
        tasks=tuple(TaskMatch(name=name) for name, _ in kinds),
        explore=0,
        guard=False,
    )


def _row(engine: LocalEngine, count: int, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a step: each kind alone, both packed; medians over rounds that alternate."""
    kinds: dict[str, dict[str, int]] = {
        "drafting": {"drafting": count},
        "plain": {"plain": count},
        "packed": {"drafting": count, "plain": count},
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(args.rounds):
        for name in (*kinds, *reversed(kinds)):
            found[name].append(_step_milliseconds(engine, kinds[name], args.steps))
    middle = {name: median(times) for name, times in found.items()}
    return {"each": count, **middle, "apart_over_packed": (middle["drafting"] + middle["plain"]) / middle["packed"]}


def _step_milliseconds(engine: LocalEngine, tasks: dict[str, int], steps: int) -> float:
    """Of decode steps alone: prompts run before, and every request outlives the last timed step."""
    names = [name for name, count in tasks.items() for _ in range(count)]
    how = Sampling(max_tokens=8 * (steps + 4), seed=0, temperature=0.0, ignore_eos=True)
    for index, name in enumerate(names):
        question = {"messages": [{"role": "user", "content": QUESTIONS[index % len(QUESTIONS)]}]}
        engine.engine.add(Submit(request_id=str(index), prompt=engine.prompt(question).tokens, sampling=how, task=name))
    begun: set[str] = set()
    while len(begun) < len(names):
        begun |= {new.request_id for new in engine.engine.step()}
    engine.engine.step()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        engine.engine.step()
        times.append(1000 * (time.perf_counter() - began))
    for index in range(len(names)):
        engine.engine.abort(str(index))
    while not engine.engine.idle:
        engine.engine.step()
    return median(times)


if __name__ == "__main__":
    sys.exit(main())
