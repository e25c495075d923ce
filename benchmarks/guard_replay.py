"""The same traffic plainly and guarded, in turn, at each concurrency: what speculation costs at worst.

One engine a row, with a fixed shape, guard and exploration on; for plain runs it is told to run everything plainly,
which its guard learns nothing from (two engines would not do: where their weights lie in memory makes a tenth of a
step). Each round runs the same prompts plain, guarded, guarded, plain; its ratio is guarded over plain throughput, the
first rounds with all that a new worker has to learn included. Per concurrency: the mean, and the lower 95 % bound by
bootstrap over rounds. Acceptance is the draft's own, and zero by the synthetic knob.

    .venv/bin/python benchmarks/guard_replay.py --out benchmarks/results/guard-cpu
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from machine import described

from specdecode_worker.commands.bench import QUESTIONS
from specdecode_worker.commands.flags import add_model_flags
from specdecode_worker.commands.local import LocalEngine, Prompt, local_engine
from specdecode_worker.contract import Plan, SyntheticKnobs, TreeShape
from specdecode_worker.engine.calibration import calibrate
from specdecode_worker.engine.messages import Sampling

LEAST = 0.97
ACCEPTANCE = {"as it is": None, "zero": SyntheticKnobs(acceptance=(0.0,))}


def main() -> int:
    args = _arguments()
    rows = []
    for name, knobs in ACCEPTANCE.items():
        for count in args.concurrency:
            rows.append({"acceptance": name, "concurrency": count, **_ratios(knobs, count, args)})
            print(_line(rows[-1]), file=sys.stderr)
    document = {
        **described(),
        "dtype": args.dtype,
        "shape": args.shape,
        "rounds": args.rounds,
        "max_tokens": args.max_tokens,
        "rows": rows,
    }
    print("\n".join(map(_line, rows)))
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(row["lower"] >= LEAST for row in rows) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--shape", default="chain:3")
    parser.add_argument("--out", metavar="STEM")
    add_model_flags(parser)
    return parser.parse_args()


def _ratios(knobs: SyntheticKnobs | None, count: int, args: argparse.Namespace) -> dict[str, Any]:
    """A fresh engine for every row: what one load has taught says nothing of another."""
    local = local_engine(args, max_num_seqs=count)
    shape = TreeShape.parse(args.shape)
    plan = Plan(draft=local.engine.draft.hash, version=1, initial=shape, max_depth=shape.depth + 2, guard=True)
    local.engine.set_plan(plan)
    calibrate(local.engine, 60)
    local.engine.set_synthetic(knobs)
    prompts = [
        local.prompt({"messages": [{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}]}) for i in range(count)
    ]
    _pace(local, prompts, 8, plainly=True)
    found = []
    for _ in range(args.rounds):
        one, two, three, four = (
            _pace(local, prompts, args.max_tokens, plainly=plainly) for plainly in (True, False, False, True)
        )
        found.append((two + three) / (one + four))
    report = local.engine.report()
    return {
        "ratio": mean(found),
        "lower": _lower_bound(found),
        # Half of the runs were plain by order; what stands here is of the others.
        "drafted_steps": report.drafts / max(1, (report.drafts + report.plain_steps) / 2),
        "tokens_per_step": 1 + report.accepted_tokens / max(1, report.drafts),
    }


def _pace(local: LocalEngine, prompts: list[Prompt], max_tokens: int, *, plainly: bool) -> float:
    local.engine.run_plainly(plainly)
    sampling = Sampling(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
    return local.answer(prompts, [sampling] * len(prompts))[1].tokens_per_second


def _lower_bound(ratios: list[float]) -> float:
    dice = random.Random(0)
    means = sorted(mean(dice.choices(ratios, k=len(ratios))) for _ in range(2000))
    return means[len(means) // 20]


def _line(row: dict[str, Any]) -> str:
    return (
        f"acceptance {row['acceptance']:8}  {row['concurrency']:3} at once  guarded/plain {row['ratio']:.3f} "
        f"(>= {row['lower']:.3f})  {row['drafted_steps']:4.0%} drafted  {row['tokens_per_step']:.2f} tokens/step"
    )


if __name__ == "__main__":
    sys.exit(main())
