"""Comparisons of shapes, samplers and numbers of drafts, in time, memory and texts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from harness import Bench, build
from shapes import LLAMA_8B

from specdecode_worker.core.messages import Submit
from specdecode_worker.sampling.params import Sampling
from stages import Run
from stages.profiles import parse
from stages.steps import Wanted, asked_of, steps_of

Row = dict[str, Any]
TREES_CONTEXT = 1024
TEXT_CONTEXT = 256
TEXT_PROMPT, TEXT_TOKENS, TEXTS = 32, 128, 32


def trees(run: Run) -> Iterator[Row]:
    """Trees of 6, 21 and 61 nodes, root included."""
    wanted = Wanted(
        shapes=("plain", "chain:5", "tree:4,2,1", "tree:4,2,2,2"), batches=(64, 16, 1), context=TREES_CONTEXT
    )
    yield from _memory(run, wanted, "coupled")


def multi_round(run: Run) -> Iterator[Row]:
    """Multi-round sampling, which keeps the distribution and not the text."""
    wanted = Wanted(shapes=("plain", "chain:3", "tree:4,2,1"), batches=(64, 16, 1), context=TREES_CONTEXT)
    yield from _memory(run, wanted, "mss")


def _memory(run: Run, wanted: Wanted, sampler: str) -> Iterator[Row]:
    """Step time, and the most memory that was allocated above what the engine holds at rest."""
    bench = build(asked_of(run, LLAMA_8B, wanted, sampler=sampler))
    for batch in bench.batches:
        for shape in wanted.shapes:
            bench.run_shape(parse(shape))
            bench.accept_as(None)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            found = bench.measure(batch, steps_of(run, batch))
            peak = torch.cuda.max_memory_allocated() - before
            row = {"batch": batch, "shape": shape, "context": bench.context, **found, "peak_bytes": peak}
            yield {"kind": "memory", "sampler": sampler, "nodes": parse(shape).nodes + 1, **row, "synthetic": True}


def two_drafts(run: Run) -> Iterator[Row]:
    """One draft, then two, each for half of the texts."""
    wanted = Wanted(shapes=("plain", "chain:3"), batches=(16, 1), context=TREES_CONTEXT)
    for loaded in (1, 2):
        bench = build(asked_of(run, LLAMA_8B, wanted, two_drafts=loaded == 2))
        for batch in bench.batches:
            for shape in wanted.shapes:
                bench.run_shape(parse(shape))
                bench.accept_as(None)
                found = bench.measure(batch, steps_of(run, batch))
                row = {
                    "batch": batch,
                    "shape": shape,
                    "drafts": loaded,
                    **found,
                    "eager_steps": bench.take_eager_steps(),
                }
                yield {"kind": "drafts", **row, "synthetic": shape != "plain"}
        del bench
        torch.cuda.empty_cache()


def texts(run: Run) -> Iterator[Row]:
    """Share of texts that differ from those of plain decoding. Random weights have more near-ties than trained ones,
    and their draft is hardly ever right."""
    wanted = Wanted(shapes=(), batches=(TEXTS, 4), context=TEXT_CONTEXT)
    bench = build(asked_of(run, LLAMA_8B, wanted, filled=False, always_right=False))
    count = 3 if run.dry else TEXTS
    for temperature in (0.0, 1.0):
        bench.run_shape(parse("plain"))
        plain = _answers(bench, count, count, temperature, run)
        for name, shape, together in (
            ("plain again", "plain", count),
            ("plain, fewer at a time", "plain", 4 if count > 4 else 1),
            ("chain:3", "chain:3", count),
            ("tree:4,2,1", "tree:4,2,1", count),
        ):
            bench.run_shape(parse(shape))
            other = _answers(bench, count, together, temperature, run)
            yield {"kind": "texts", "case": name, "temperature": temperature, **differences(plain, other)}


def _answers(bench: Bench, count: int, together: int, temperature: float, run: Run) -> list[tuple[int, ...]]:
    """The answers of ``count`` requests, ``together`` at a time."""
    tokens = 8 if run.dry else TEXT_TOKENS
    answers: dict[str, list[int]] = {str(index): [] for index in range(count)}
    for first in range(0, count, together):
        for index in range(first, min(first + together, count)):
            draw = random.Random(index)
            prompt = tuple(draw.randrange(bench.engine.vocab_size) for _ in range(TEXT_PROMPT))
            sampling = Sampling(max_tokens=tokens, seed=index, temperature=temperature, ignore_eos=True)
            bench.engine.add(Submit(request_id=str(index), prompt=prompt, sampling=sampling))
        while not bench.engine.idle:
            for new in bench.engine.step():
                answers[new.request_id] += new.tokens
    return [tuple(answer) for answer in answers.values()]


def differences(plain: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> Row:
    """Share of texts that differ, and of tokens before the first difference."""
    same = [
        next((at for at, (a, b) in enumerate(zip(one, two, strict=True)) if a != b), len(one))
        for one, two in zip(plain, other, strict=True)
    ]
    lengths = [len(one) for one in plain]
    differ = sum(at < length for at, length in zip(same, lengths, strict=True))
    return {
        "texts": len(plain),
        "share_differing": differ / len(plain),
        "share_of_tokens_before": sum(same) / sum(lengths),
    }
