"""Prompts: the prefill of 8k tokens, and latency while requests keep arriving."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from harness import Bench, build
from shapes import LLAMA_8B

from specdecode_worker.core.messages import Submit
from specdecode_worker.sampling.params import Sampling
from stages import Run
from stages.profiles import parse
from stages.steps import CONTEXT, Wanted, asked_of

Row = dict[str, Any]
FIRST_TOKEN = 20
"""Prompts use no token below, so that none begins with a prefix that another stage made known."""
STEP_TOKENS = (2048, 8192)
"""max_num_batched_tokens of the prefills; arrivals are served with the first."""
PREFILLS = 4


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that arrive whether or not earlier ones are done."""

    requests: int
    prompt: int
    answer: int
    gap_seconds: float
    """Mean of the exponential times between arrivals."""


LOAD = Load(requests=64, prompt=2048, answer=128, gap_seconds=0.1)
TINY_LOAD = Load(requests=4, prompt=24, answer=6, gap_seconds=0.01)


@dataclass(slots=True)
class Latency:
    """Seconds: to the first token of each request, and between the later ones (a step's tokens arrive together)."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)


def serving(run: Run) -> Iterator[Row]:
    for index, tokens in enumerate(STEP_TOKENS):
        wanted = Wanted(shapes=("plain",), batches=(16, 8, 4, 2, 1), context=CONTEXT)
        bench = build(asked_of(run, LLAMA_8B, wanted, filled=False, batched_tokens=tokens))
        yield from _prefills(bench, tokens, run)
        if index == 0:
            for shape in ("plain", "chain:3"):
                yield _arrivals(bench, shape, TINY_LOAD if run.dry else LOAD)
        del bench
        torch.cuda.empty_cache()


def _prefills(bench: Bench, step_tokens: int, run: Run) -> Iterator[Row]:
    """A prompt of the whole context alone, until its first token. The first one compiles, and is left out."""
    bench.run_shape(parse("plain"))
    times = []
    for index in range(1 + (1 if run.dry else PREFILLS)):
        request = _request(bench, f"prefill-{index}", bench.context, 1, seed=index)
        torch.cuda.synchronize()
        began = time.perf_counter()
        bench.engine.add(request)
        bench.drain()
        times.append(time.perf_counter() - began)
    took = sorted(times[1:])[len(times[1:]) // 2]
    yield {
        "kind": "prefill",
        "tokens": bench.context,
        "max_num_batched_tokens": step_tokens,
        "milliseconds": 1e3 * took,
        "tokens_per_second": bench.context / took,
    }


def _arrivals(bench: Bench, shape: str, load: Load) -> Row:
    """Open loop, the same times of arrival for every shape. The engine's thread admits what is due between steps."""
    bench.run_shape(parse(shape))
    bench.accept_as(None if shape == "plain" else bench.shapes.profile)
    bench.take_eager_steps()
    latency, took = _serve(bench, shape, load)
    return {
        "kind": "arrivals",
        "shape": shape,
        "requests": load.requests,
        "prompt": load.prompt,
        "answer": load.answer,
        "requests_per_second": 1 / load.gap_seconds,
        "output_tokens_per_second": load.requests * load.answer / took,
        **{f"ttft_p{at}_milliseconds": 1e3 * quantile(latency.first, at) for at in (50, 95)},
        **{f"itl_p{at}_milliseconds": 1e3 * quantile(latency.between, at) for at in (50, 95, 99)},
        "eager_steps": bench.take_eager_steps(),
        "synthetic": shape != "plain",
    }


def _serve(bench: Bench, shape: str, load: Load) -> tuple[Latency, float]:
    due, began, latency = _due(load), time.perf_counter(), Latency()
    last: dict[str, float] = {}
    arrived: dict[str, float] = {}
    while due or not bench.engine.idle:
        now = time.perf_counter() - began
        while due and due[0] <= now:
            at, name = due.pop(0), f"{shape}-{len(arrived)}"
            arrived[name] = at
            bench.engine.add(_request(bench, name, load.prompt, load.answer, seed=1000 + len(arrived)))
        if bench.engine.idle:
            time.sleep(max(0.0, due[0] - now))
            continue
        for new in bench.engine.step():
            now = time.perf_counter() - began
            if new.tokens:
                since = last.get(new.request_id)
                (latency.first if since is None else latency.between).append(
                    now - (arrived[new.request_id] if since is None else since)
                )
                last[new.request_id] = now
    return latency, time.perf_counter() - began


def _due(load: Load) -> list[float]:
    """Seconds at which the requests arrive."""
    draw, at, due = random.Random(0), 0.0, []
    for _ in range(load.requests):
        due.append(at)
        at += draw.expovariate(1 / load.gap_seconds)
    return due


def _request(bench: Bench, name: str, prompt: int, answer: int, *, seed: int) -> Submit:
    """A request whose prompt no other one shares."""
    draw, most = random.Random(f"{name} {seed}"), bench.engine.vocab_size - 1
    tokens = tuple(draw.randint(FIRST_TOKEN, most) for _ in range(prompt))
    sampling = Sampling(max_tokens=answer, seed=seed, temperature=1.0, ignore_eos=True)
    return Submit(request_id=name, prompt=tokens, sampling=sampling)


def quantile(values: Sequence[float], percent: int) -> float:
    """The value that ``percent`` of them do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else 0.0
