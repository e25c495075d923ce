"""Comparison of decoding with and without speculation."""

from __future__ import annotations

import argparse
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import Any

from specdecode_worker.commands.flags import method_and_draft
from specdecode_worker.commands.local_engine import (
    DEFAULT_SHAPE,
    Answer,
    LocalEngine,
    RunTiming,
    TokenizedPrompt,
    distinct_4grams,
    local_engine,
    sampling_of,
)
from specdecode_worker.contract import TreeShape
from specdecode_worker.core.messages import Tokens
from specdecode_worker.sampling.params import Sampling

# Command ``eval`` on the engine: acceptance and speed-up of a draft of any method, by domain and temperature.
#
# Every prompt is answered twice, plainly and with the draft, with the same seed. The counts come from the steps that
# the engine takes, so they hold for every method and device and for sampled text.

CONTEXT_EDGES = (256, 1024, 4096, 16384, 65536)
"""Bounds of the context lengths for which acceptance is reported, in tokens. A bound belongs to the range below it."""
_PLAIN = TreeShape(())


@dataclass(frozen=True, slots=True)
class DecodingStep:
    """One decoding step of a request.

    ``context`` is the number of tokens before it, prompt included, and ``tokens`` the number that it emitted.
    ``accepted`` is the number of accepted nodes if it verified a draft. Prompt lookup often has none; such a step emits
    one token.
    """

    context: int
    tokens: int
    accepted: int | None


class DecodingSteps:
    """Decoding steps of requests; the first tokens of an answer come from its prompt and are not counted."""

    def __init__(self, prompts: Sequence[TokenizedPrompt]) -> None:
        self.by_request: list[list[DecodingStep]] = [[] for _ in prompts]
        self._contexts = [len(prompt.tokens) for prompt in prompts]
        self._sums = [(0, 0)] * len(prompts)
        self._started: set[int] = set()

    def take(self, index: int, new: Tokens) -> None:
        """Record one step of request ``index``."""
        drafts, accepted = self._sums[index]
        if index in self._started and new.tokens:
            walked = new.accepted - accepted if new.drafts > drafts else None
            self.by_request[index].append(DecodingStep(self._contexts[index], len(new.tokens), walked))
        self._sums[index] = new.drafts, new.accepted
        self._contexts[index] += len(new.tokens)
        self._started.add(index)


def accepted_nodes(steps: Iterable[DecodingStep]) -> list[int]:
    """Return the number of accepted nodes of each step that verified a draft."""
    return [step.accepted for step in steps if step.accepted is not None]


def acceptance_by_depth(accepted: Sequence[int], depth: int) -> list[float]:
    """Return the share of steps that accepted a node at each depth, if its parent was accepted, to four digits."""
    reached = [sum(count >= level for count in accepted) for level in range(depth + 1)]
    return [round(after / max(before, 1), 4) for before, after in pairwise(reached)]


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
    steps: Sequence[Sequence[DecodingStep]]
    """Steps of each request with the draft."""


def evaluate_on_engine(args: argparse.Namespace) -> dict[str, Any]:
    """Return the document of ``eval`` for the draft and the temperatures given by the flags.

    Raises:
        ValueError: The flags contradict each other.
        ModelError: A model cannot be fetched or loaded.
        PromptFileError: The file of prompts cannot be used.
    """
    method, draft = method_and_draft(args)
    shape = args.shape or DEFAULT_SHAPE
    document: dict[str, Any] = {
        "method": method,
        "draft": draft,
        "shape": list(shape.parents),
        "concurrency": args.concurrency,
        **_evaluated(args, shape),
    }
    if args.against:
        plain = argparse.Namespace(**vars(args) | {"model": args.against, "quantization": None, "adapter": None})
        document["against"] = {"model": args.against, **_evaluated(plain, shape)}
    return document


def _evaluated(args: argparse.Namespace, shape: TreeShape) -> dict[str, Any]:
    """Return the results on one target, which is gone afterwards."""
    engine = local_engine(args, max_num_seqs=args.concurrency)
    try:
        prompts = engine.prompts(Path(args.prompts))
        runs = [_run_temperature(engine, prompts, shape, at, args) for at in args.temperature]
    finally:
        engine.close()
    return {"target_format": engine.target_format, "conversations": len(prompts), "runs": runs}


def _run_temperature(
    engine: LocalEngine,
    prompts: Sequence[TokenizedPrompt],
    shape: TreeShape,
    temperature: float,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Answer all prompts at one temperature, domain by domain, and return the results."""
    by_domain: dict[str, list[TokenizedPrompt]] = {}
    for prompt in prompts:
        by_domain.setdefault(prompt.domain, []).append(prompt)
    domains = {}
    for domain, own in sorted(by_domain.items()):
        domains[domain] = _run_domain(engine, own, shape, temperature, args)
        print(f"eval: {domain} at temperature {temperature:g}: {len(own)} answers", file=sys.stderr, flush=True)
    return {
        "temperature": temperature,
        "overall": _figures(list(domains.values()), shape.depth),
        "domains": {name: _figures([run], shape.depth) for name, run in domains.items()},
    }


def _run_domain(
    engine: LocalEngine,
    prompts: Sequence[TokenizedPrompt],
    shape: TreeShape,
    temperature: float,
    args: argparse.Namespace,
) -> DomainRun:
    """Answer the prompts plainly, then with ``shape``. Nothing is cached from one run to another.

    Suffix decoding would otherwise draft from the plain answers, which are the very texts that it has to draft.
    """
    sampling = [Sampling(max_tokens=args.max_tokens, temperature=temperature, seed=i) for i in range(len(prompts))]
    engine.run_shape(_PLAIN)
    plain, plain_timing = engine.answer(prompts, sampling, isolated=True, together=args.concurrency)
    engine.run_shape(shape)
    steps = DecodingSteps(prompts)
    drafted, drafted_timing = engine.answer(prompts, sampling, steps.take, isolated=True, together=args.concurrency)
    return DomainRun(plain, drafted, plain_timing, drafted_timing, steps.by_request)


def _figures(runs: Sequence[DomainRun], depth: int) -> dict[str, Any]:
    """Return the results of some domains together."""
    requests = [steps for run in runs for steps in run.steps]
    every = [step for steps in requests for step in steps]
    accepted = accepted_nodes(every)
    pace, error = tokens_per_step([(len(steps), sum(step.tokens for step in steps)) for steps in requests])
    plain, drafted = ([answer.tokens for run in runs for answer in getattr(run, name)] for name in ("plain", "drafted"))
    plain_rate = RunTiming.total([run.plain_timing for run in runs]).tokens_per_second
    drafted_rate = RunTiming.total([run.drafted_timing for run in runs]).tokens_per_second
    contexts: dict[int, list[DecodingStep]] = defaultdict(list)
    for step in every:
        contexts[bisect_left(CONTEXT_EDGES, step.context)].append(step)
    return {
        "tokens_per_step": round(pace, 4),
        "standard_error": round(error, 4),
        "drafted_steps": round(len(accepted) / max(len(every), 1), 4),
        "tokens_per_drafted_step": round(1 + sum(accepted) / max(len(accepted), 1), 4),
        "acceptance": acceptance_by_depth(accepted, depth),
        "contexts": {_context_name(place): _context_figures(contexts[place], depth) for place in sorted(contexts)},
        "distinct_4grams": round(distinct_4grams(drafted), 4),
        "speedup": round(drafted_rate / plain_rate, 3) if plain_rate else 0.0,
        "identical_texts": round(sum(a == b for a, b in zip(plain, drafted, strict=True)) / len(plain), 4),
    }


def _context_name(place: int) -> str:
    """Return the range of context lengths number ``place``, such as 257-1024."""
    first = CONTEXT_EDGES[place - 1] + 1 if place else 1
    return f"{first}-{CONTEXT_EDGES[place]}" if place < len(CONTEXT_EDGES) else f"{first}-"


def _context_figures(steps: Sequence[DecodingStep], depth: int) -> dict[str, Any]:
    """Return the results of the steps in one range of context lengths."""
    return {
        "steps": len(steps),
        "tokens_per_step": round(sum(step.tokens for step in steps) / len(steps), 4),
        "acceptance": acceptance_by_depth(accepted_nodes(steps), depth),
    }


def table(document: dict[str, Any]) -> str:
    """Format the results as a table with a row for each temperature and domain."""
    lines = _rows(document)
    if "against" in document:
        lines += ["", *_rows(document["against"]), ""]
        for run, other in zip(document["runs"], document["against"]["runs"], strict=True):
            ratio = run["overall"]["tokens_per_step"] / max(other["overall"]["tokens_per_step"], 1e-9)
            lines.append(f"{run['temperature']:4.1f} {'tokens/step over those of the other format':>42} {ratio:.3f}")
    return "\n".join(lines)


def _rows(document: dict[str, Any]) -> list[str]:
    lines = [
        f"target: {document['target_format']}",
        f"{'T':>4} {'':10} {'tokens/step':>11} {'drafted':>8} {'speedup':>8} {'same text':>9}  acceptance by depth",
    ]
    for run in document["runs"]:
        parts = {"overall": run["overall"], **run["domains"]}
        for name, part in [*parts.items(), *run["overall"]["contexts"].items()]:
            line = f"{run['temperature']:4.1f} {name:10} {part['tokens_per_step']:11.3f}"
            if "speedup" in part:
                line += f" {part['drafted_steps']:8.2f} {part['speedup']:8.2f} {part['identical_texts']:9.2f}"
            else:
                line += f"  in {part['steps']} steps at a context of {name} tokens"
            lines.append(line + "  " + " ".join(f"{share:.2f}" for share in part["acceptance"]))
    return lines


# Comparison of a shape with plain decoding.
#
# The runs are interleaved, so that a change in the speed of the machine affects both equally.


def compare(
    engine: LocalEngine, prompts: Sequence[TokenizedPrompt], together: int, shape: TreeShape, args: argparse.Namespace
) -> dict[str, Any]:
    """Measure plain decoding and ``shape``, and return their speeds, the ratio, and the tokens per step.

    A round runs plain decoding, the shape twice, and plain decoding again. An incomplete last group of prompts is left
    out.
    """
    prompts = prompts[: len(prompts) // together * together]
    sampling = [sampling_of(args, index) for index in range(len(prompts))]
    runs = {"plain": _PLAIN, str(shape): shape}
    for run_shape in runs.values():
        _warm(engine, prompts[:together], run_shape, args)
    answers: dict[str, list[Answer]] = {}
    timings: dict[str, list[RunTiming]] = {name: [] for name in runs}
    for name in [*runs, *reversed(runs)] * args.rounds:
        engine.run_shape(runs[name])
        answers[name], timing = engine.answer(prompts, sampling, together=together)
        timings[name].append(timing)
        print(f"  {together} at once, {name}: {timing.tokens_per_second:.1f} tokens/s", file=sys.stderr)
    plain, drafted = (answers[name] for name in runs)
    plain_timing, drafted_timing = (RunTiming.total(timings[name]) for name in runs)
    drafts = sum(answer.drafts for answer in drafted)
    same = sum(a.tokens == b.tokens for a, b in zip(plain, drafted, strict=True))
    return {
        "plain": _timing_fields(plain_timing),
        "speculative": _timing_fields(drafted_timing),
        "ratio": drafted_timing.tokens_per_second / plain_timing.tokens_per_second,
        "tokens_per_step": 1 + sum(answer.accepted for answer in drafted) / drafts if drafts else 1.0,
        "distinct_4grams": distinct_4grams([answer.tokens for answer in drafted]),
        "identical": same == len(drafted),
        "identical_answers": f"{same}/{len(drafted)}",
    }


def _warm(engine: LocalEngine, prompts: Sequence[TokenizedPrompt], shape: TreeShape, args: argparse.Namespace) -> None:
    """Run a few tokens of a shape before anything is timed."""
    engine.run_shape(shape)
    short = argparse.Namespace(**{**vars(args), "max_tokens": min(args.max_tokens, 8)})
    engine.answer(prompts, [sampling_of(short, index) for index in range(len(prompts))])


def _timing_fields(timing: RunTiming) -> dict[str, float]:
    """Return the speed of a run as a dictionary."""
    return {"tokens_per_second": timing.tokens_per_second, "step_milliseconds": timing.step_milliseconds}


# Output of ``bench``: a text table.

HEADER = "  at once   plain tok/s   spec tok/s   ratio   tok/step   plain ms   spec ms   4-grams   identical"


def comparison_table(document: dict[str, Any]) -> str:
    """Return a heading, and a table with a row for each concurrency."""
    heading = (
        f"{document['model']}, {document['dtype']}, {document['instruction_set']}, {document['threads']} threads, "
        f"{document['machine']}, {document['date']}"
    )
    rows = (_row(count, row) for count, row in document["concurrency"].items())
    return "\n".join((heading, "", document["shape"], HEADER, *rows))


def _row(count: int, row: dict[str, Any]) -> str:
    """Format the results at one concurrency."""
    plain, speculative = row["plain"], row["speculative"]
    return (
        f"  {count:7}   {plain['tokens_per_second']:11.1f}   {speculative['tokens_per_second']:10.1f}   "
        f"{row['ratio']:5.2f}   {row['tokens_per_step']:8.2f}   {plain['step_milliseconds']:8.1f}   "
        f"{speculative['step_milliseconds']:7.1f}   {row['distinct_4grams']:7.2f}   {row['identical_answers']:>9}"
    )
