"""The same traffic plainly and guarded, in turn, at each concurrency: what speculation costs at worst.

One engine a row, with a fixed shape, guard and exploration on; for plain turns it is told to run everything plainly,
which its guard learns nothing from (two engines would not do: where their weights lie in memory makes a tenth of a
step). Requests of mixed lengths wait behind those that run, so that the concurrency is always that of the row.
Turns are short (``--steps``) and go plain, guarded, guarded, plain: a machine's slow moments then meet both. What the
draft has missed in a plain turn it makes up for in guarded ones, at their cost. Steps in which a request begins are
left out: they are alike in both, and by chance in one or the other.

Throughput is in tokens per second of the processor, which other processes cannot take; that of the clock stands
beside it. Per concurrency: guarded over plain, over all rounds but the first, and its lower 95 % bound by bootstrap
over rounds. What a new worker has to learn in the first rounds comes once in its life, and is told in seconds.
Acceptance is the draft's own, and zero by the synthetic knob.

    .venv/bin/python benchmarks/guard_replay.py --threads 1 --out benchmarks/results/guard-cpu
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count as iter_count
from itertools import cycle
from pathlib import Path
from typing import Any

from machine import described

from specdecode_worker.commands.bench import QUESTIONS
from specdecode_worker.commands.flags import add_model_flags
from specdecode_worker.commands.local_engine import LocalEngine, local_engine
from specdecode_worker.contract import Plan, SyntheticKnobs, TreeShape
from specdecode_worker.core.messages import Submit
from specdecode_worker.engine.calibration import calibrate
from specdecode_worker.sampling.params import Sampling

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
        "steps": args.steps,
        "seconds": args.seconds,
        "warm_up_rounds": args.warm_up,
        "max_tokens": args.max_tokens,
        "rows": rows,
    }
    print("\n".join(map(_line, rows)))
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(row["lower"] >= LEAST for row in rows) else 1


@dataclass(frozen=True, slots=True)
class Turn:
    """What some steps brought, and took by both clocks."""

    tokens: int = 0
    processor_seconds: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Turn) -> Turn:
        return Turn(
            self.tokens + other.tokens,
            self.processor_seconds + other.processor_seconds,
            self.seconds + other.seconds,
        )


class Traffic:
    """Requests without end, so many at once."""

    def __init__(self, local: LocalEngine, count: int, most: int) -> None:
        self._engine, self._count, self._most = local.engine, count, most
        lines = [{"messages": [{"role": "user", "content": question}]} for question in QUESTIONS]
        self._prompts = cycle([local.prompt(line) for line in lines])
        self._lengths, self._names = random.Random(count), iter_count()
        self._open = 0
        self._running: set[str] = set()

    def turn(self, steps: int, *, plainly: bool) -> Turn:
        """So many steps, and tokens that they emitted."""
        self._engine.force_shape(TreeShape(()) if plainly else None)
        return sum((self._step() for _ in range(steps)), Turn())

    def _step(self) -> Turn:
        self._refill()
        began, began_processor = time.monotonic(), time.process_time()
        found = self._engine.step()
        taken = time.process_time() - began_processor, time.monotonic() - began
        self._open -= sum(bool(new.finish) for new in found)
        began_here = {new.request_id for new in found} - self._running
        self._running = (self._running | began_here) - {new.request_id for new in found if new.finish}
        return Turn() if began_here else Turn(sum(len(new.tokens) for new in found), *taken)

    def _refill(self) -> None:
        while self._open < 2 * self._count:
            length = self._lengths.randint(self._most // 3, self._most)
            sampling = Sampling(max_tokens=length, seed=0, temperature=0.0, ignore_eos=True)
            name = str(next(self._names))
            self._engine.add(Submit(request_id=name, prompt=next(self._prompts).tokens, sampling=sampling))
            self._open += 1


Round = tuple[Turn, Turn]  # guarded, plain


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4, 8, 16])
    parser.add_argument("--seconds", type=float, default=60, help="of every row, by the clock")
    parser.add_argument("--steps", type=int, default=8, help="of a turn")
    parser.add_argument("--warm-up", type=int, default=8, help="rounds at the beginning that are not compared")
    parser.add_argument("--max-tokens", type=int, default=96, help="of the longest answer; the shortest has a third")
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
    traffic = Traffic(local, count, args.max_tokens)
    traffic.turn(args.steps, plainly=True)
    rounds: list[Round] = []
    ends = time.monotonic() + args.seconds
    while time.monotonic() < ends:
        one, two, three, four = (traffic.turn(args.steps, plainly=plainly) for plainly in (True, False, False, True))
        rounds.append((two + three, one + four))
    report = local.engine.report()
    guarded_steps = 2 * args.steps * len(rounds)
    first, rounds = rounds[: args.warm_up], rounds[args.warm_up :]
    if not rounds:
        raise SystemExit(f"error: {len(first)} rounds ran, all of them warm-up; raise --seconds or lower --warm-up")
    return {
        "rounds": len(rounds),
        "ratio": _ratio(rounds),
        "lower": _lower_bound(rounds),
        "learning_seconds": _lost_seconds(first, rounds),
        "ratio_by_the_clock": _ratio(rounds, lambda turn: turn.seconds),
        "drafted_steps": report.drafts / count / guarded_steps,
        "tokens_per_step": 1 + report.accepted_tokens / max(1, report.drafts),
    }


def _ratio(rounds: Sequence[Round], seconds: Callable[[Turn], float] = lambda turn: turn.processor_seconds) -> float:
    guarded, plain = (sum((round_[side] for round_ in rounds), Turn()) for side in (0, 1))
    return (guarded.tokens / seconds(guarded)) / (plain.tokens / seconds(plain))


def _lost_seconds(first: Sequence[Round], rounds: Sequence[Round]) -> float:
    """Of the processor, in the first guarded turns, over what their tokens take plainly."""
    guarded, plain = sum((turn for turn, _ in first), Turn()), sum((turn for _, turn in rounds), Turn())
    return guarded.processor_seconds - guarded.tokens * plain.processor_seconds / plain.tokens


def _lower_bound(rounds: Sequence[Round]) -> float:
    dice = random.Random(0)
    found = sorted(_ratio(dice.choices(rounds, k=len(rounds))) for _ in range(2000))
    return found[len(found) // 20]


def _line(row: dict[str, Any]) -> str:
    return (
        f"acceptance {row['acceptance']:8}  {row['concurrency']:3} at once  guarded/plain {row['ratio']:.3f} "
        f"(>= {row['lower']:.3f}, by the clock {row['ratio_by_the_clock']:.3f})  "
        f"learning {row['learning_seconds']:.1f} s  "
        f"{row['drafted_steps']:4.0%} drafted  {row['tokens_per_step']:.2f} tokens/step"
    )


if __name__ == "__main__":
    sys.exit(main())
