"""Records what steps of the real engine take, for the simulator: concurrency x depth x context, with noise.

    python benchmarks/record_steps.py > benchmarks/recordings/steps-smollm2-cpu.json

Every cell runs the same requests and changes the shape between steps. ``seconds`` is the median of the process's CPU
seconds with one thread, which neighbours on the machine hardly touch; ``wall`` are wall seconds over that median,
sample by sample, in the order in which they came: the noise that a worker lives with. About five minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from statistics import median
from typing import Any

import torch
from machine import described

from specdecode_worker.commands.flags import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specdecode_worker.commands.local_engine import LocalEngine
from specdecode_worker.contract import DraftConfig, EngineConfig, ModelConfig, TreeShape, WorkerConfig
from specdecode_worker.core.messages import Submit
from specdecode_worker.models.fetch import default_cache_dir
from specdecode_worker.sampling.params import Sampling

GRID = (
    (1, 128),
    (2, 128),
    (4, 128),
    (8, 128),
    (16, 128),
    (1, 1024),
    (4, 1024),
    (8, 1024),
    (16, 1024),
    (1, 4096),
    (4, 4096),
)
"""(concurrency, tokens of context of each)."""
DEPTHS = tuple(range(8))
WARM, KEPT = 2, 9
SERIES = 300
"""Steps of one kind in a row, for how noise hangs together."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    args = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(args.dtype)
    cells, chunks = [], []
    for sequences, context in GRID:
        print(f"{sequences} sequences of {context} tokens", file=sys.stderr, flush=True)
        chunks += bench.fill(sequences, context)
        cells += [bench.cell(sequences, context, depth) for depth in DEPTHS]
        bench.clear()
    for tokens in (32, 64, 256, 512, 2048):
        chunks += bench.fill(2, tokens)
        bench.clear()
    bench.fill(4, 128)
    series = bench.timed(TreeShape.chain(3), SERIES)
    document = {
        "kind": "steps",
        "target": EMBEDDED_TARGET,
        "draft": {"uri": EMBEDDED_DRAFT},
        "dtype": args.dtype,
        "command": "python benchmarks/record_steps.py",
        **described(),
        "cells": cells,
        "chunks": chunks,
        "series": _ratios(series),
    }
    print(json.dumps(document))


class Bench:
    """One engine; requests that never end by themselves."""

    def __init__(self, dtype: str) -> None:
        config = WorkerConfig(
            model=ModelConfig(uri=EMBEDDED_TARGET, served_name="recorded", dtype=dtype),
            draft=DraftConfig(uri=EMBEDDED_DRAFT, required=True),
            engine=EngineConfig(
                max_num_seqs=16, max_num_batched_tokens=8192, kv_cache_tokens=32768, device="cpu", threads=1
            ),
        )
        self.local = LocalEngine(config, default_cache_dir())
        self.random = random.Random(0)
        self.live: list[str] = []
        self.count = 0

    def fill(self, sequences: int, context: int) -> list[dict[str, float]]:
        """Starts requests and runs their prompts, one a step; returns what those steps took."""
        self.local.run_shape(TreeShape.chain(1))
        chunks = []
        for _ in range(sequences):
            self.count += 1
            name = str(self.count)
            prompt = tuple(self.random.randrange(1000, 40000) for _ in range(context))
            how = Sampling(max_tokens=2048, seed=self.count, temperature=0.0, ignore_eos=True)
            self.local.engine.add(Submit(request_id=name, prompt=prompt, sampling=how))
            seconds = self._step()[0]
            chunks.append({"sequences": len(self.live), "tokens": context, "seconds": round(seconds, 6)})
            self.live.append(name)
        return chunks

    def cell(self, sequences: int, context: int, depth: int) -> dict[str, Any]:
        samples = self.timed(TreeShape.chain(depth), WARM + KEPT)[WARM:]
        return {
            "sequences": sequences,
            "context": context,
            "depth": depth,
            "seconds": round(median(cpu for cpu, _ in samples), 6),
            "wall": _ratios(samples),
        }

    def timed(self, shape: TreeShape, steps: int) -> list[tuple[float, float]]:
        self.local.run_shape(shape)
        return [self._step() for _ in range(steps)]

    def clear(self) -> None:
        for name in self.live:
            self.local.engine.abort(name)
        self.live = []
        while not self.local.engine.idle:
            self.local.engine.step()

    def _step(self) -> tuple[float, float]:
        cpu, wall = time.process_time(), time.perf_counter()
        self.local.engine.step()
        return time.process_time() - cpu, time.perf_counter() - wall


def _ratios(samples: list[tuple[float, float]]) -> list[float]:
    """Wall seconds over the median of CPU seconds."""
    typical = median(cpu for cpu, _ in samples)
    return [round(wall / typical, 4) for _, wall in samples]


if __name__ == "__main__":
    main()
