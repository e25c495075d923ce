"""Command ``eval`` on the engine: acceptance and speed-up of a draft of any method, by domain and temperature.

Every prompt is answered twice, plainly and with the draft, with the same seed. The counts come from the steps that the
engine takes, so they hold for every method and device and for sampled text. The replay of ``training.evaluation`` is
faster for an EAGLE-3 head and advises a depth from one pass, but it knows greedy text on a CPU only.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any

from specdecode_worker.commands.common.flags import method_and_draft
from specdecode_worker.commands.common.local_engine import (
    DEFAULT_SHAPE,
    Answer,
    LocalEngine,
    Prompt,
    RunTiming,
    distinct_4grams,
    local_engine,
)
from specdecode_worker.commands.common.sampler_comparison import Walks
from specdecode_worker.contract import TreeShape
from specdecode_worker.engine.ipc.messages import Sampling, Tokens

DEFAULT_CONCURRENCY = 8
_PLAIN = TreeShape(())


@dataclass(slots=True)
class DecodingSteps:
    """Decoding steps of a run of requests; the first tokens of an answer come from its prompt and are not counted.

    ``walks`` holds the steps that verified a draft. Prompt lookup often has none, and such a step emits one token.
    """

    walks: Walks
    by_request: dict[int, tuple[int, int]] = field(default_factory=lambda: defaultdict(lambda: (0, 0)))
    """Steps and tokens of each request."""
    _started: set[int] = field(default_factory=set)

    def take(self, index: int, new: Tokens) -> None:
        """Count one step of request ``index``."""
        self.walks.take(index, new)
        if index in self._started and new.tokens:
            steps, tokens = self.by_request[index]
            self.by_request[index] = steps + 1, tokens + len(new.tokens)
        self._started.add(index)


def tokens_per_step(counts: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Return the tokens per step of requests, given their steps and tokens, and its standard error.

    The error is clustered by request, because steps of one text are correlated.
    """
    steps, tokens = (sum(part) for part in zip(*counts, strict=True)) if counts else (0, 0)
    if not steps:
        return 0.0, 0.0
    mean = tokens / steps
    return mean, sqrt(sum((own_tokens - mean * own_steps) ** 2 for own_steps, own_tokens in counts)) / steps


@dataclass(frozen=True, slots=True)
class DomainRun:
    """Answers to the prompts of one domain at one temperature, without and with the draft."""

    plain: Sequence[Answer]
    drafted: Sequence[Answer]
    plain_timing: RunTiming
    drafted_timing: RunTiming
    steps: DecodingSteps


def evaluate_on_engine(args: argparse.Namespace) -> dict[str, Any]:
    """Return the document of ``eval`` for the draft and the temperatures given by the flags.

    Raises:
        ValueError: The flags contradict each other, or a prompt is invalid.
        ModelError: A model cannot be fetched or loaded.
        OSError: The prompts file cannot be read.
    """
    method, draft = method_and_draft(args)
    engine = local_engine(args, max_num_seqs=args.concurrency)
    shape = args.shape or DEFAULT_SHAPE
    try:
        prompts = engine.prompts(Path(args.prompts))
        runs = [_run_temperature(engine, prompts, shape, at, args.max_tokens) for at in args.temperature]
    finally:
        engine.close()
    return {
        "method": method,
        "draft": draft,
        "shape": list(shape.parents),
        "concurrency": args.concurrency,
        "conversations": len(prompts),
        "runs": runs,
    }


def _run_temperature(
    engine: LocalEngine, prompts: Sequence[Prompt], shape: TreeShape, temperature: float, max_tokens: int
) -> dict[str, Any]:
    """Answer all prompts at one temperature, domain by domain, and return the results."""
    by_domain: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_domain.setdefault(prompt.domain, []).append(prompt)
    domains = {}
    for domain, own in sorted(by_domain.items()):
        domains[domain] = _run_domain(engine, own, shape, temperature, max_tokens)
        print(f"eval: {domain} at temperature {temperature:g}: {len(own)} answers", file=sys.stderr, flush=True)
    return {"temperature": temperature, **_results(domains, max(shape.depths))}


def _run_domain(
    engine: LocalEngine, prompts: Sequence[Prompt], shape: TreeShape, temperature: float, max_tokens: int
) -> DomainRun:
    """Answer the prompts plainly, then with ``shape``. Nothing is cached from one run to another.

    Suffix decoding would otherwise draft from the plain answers, which are the very texts that it has to draft.
    """
    sampling = [Sampling(max_tokens=max_tokens, temperature=temperature, seed=i) for i in range(len(prompts))]
    engine.run_shape(_PLAIN)
    plain, plain_timing = engine.answer(prompts, sampling, isolated=True)
    engine.run_shape(shape)
    steps = DecodingSteps(Walks.of(len(prompts)))
    drafted, drafted_timing = engine.answer(prompts, sampling, steps.take, isolated=True)
    return DomainRun(plain, drafted, plain_timing, drafted_timing, steps)


def _results(domains: dict[str, DomainRun], depth: int) -> dict[str, Any]:
    """Return the results of all domains together and of each."""
    every = list(domains.values())
    return {
        "overall": _figures(every, depth),
        "domains": {name: _figures([run], depth) for name, run in domains.items()},
    }


def _figures(runs: Sequence[DomainRun], depth: int) -> dict[str, Any]:
    walks = Walks([accepted for run in runs for accepted in run.steps.walks.accepted])
    counts = [each for run in runs for each in run.steps.by_request.values()]
    pace, error = tokens_per_step(counts)
    steps = sum(own_steps for own_steps, _ in counts)
    plain, drafted = ([answer.tokens for run in runs for answer in getattr(run, name)] for name in ("plain", "drafted"))
    plain_rate = _rate([run.plain_timing for run in runs])
    return {
        "tokens_per_step": round(pace, 4),
        "standard_error": round(error, 4),
        "drafted_steps": round(walks.steps / max(steps, 1), 4),
        "tokens_per_drafted_step": round(walks.tokens_per_step, 4),
        "acceptance": [round(share, 4) for share in walks.by_depth(depth)],
        "distinct_4grams": round(distinct_4grams(drafted), 4),
        "speedup": round(_rate([run.drafted_timing for run in runs]) / plain_rate, 3) if plain_rate else 0.0,
        "identical_texts": round(sum(a == b for a, b in zip(plain, drafted, strict=True)) / len(plain), 4),
    }


def _rate(timings: Sequence[RunTiming]) -> float:
    """Return the emitted tokens per second over several runs."""
    seconds = sum(timing.seconds for timing in timings)
    return sum(timing.tokens for timing in timings) / seconds if seconds else 0.0


def table(document: dict[str, Any]) -> str:
    """Format the results as a table with a row for each temperature and domain."""
    lines = [
        f"{'T':>4} {'':10} {'tokens/step':>11} {'drafted':>8} {'speedup':>8} {'same text':>9}  acceptance by depth"
    ]
    for run in document["runs"]:
        for name, part in {"overall": run["overall"], **run["domains"]}.items():
            acceptance = " ".join(f"{share:.2f}" for share in part["acceptance"])
            lines.append(
                f"{run['temperature']:4.1f} {name:10} {part['tokens_per_step']:11.3f} {part['drafted_steps']:8.2f} "
                f"{part['speedup']:8.2f} {part['identical_texts']:9.2f}  {acceptance}"
            )
    return "\n".join(lines)
