"""Coupled, multi-round and single-round sampling on chains and trees: tokens per step, step time, and equal texts.

    python benchmarks/samplers.py --out out/samplers.jsonl
    python benchmarks/samplers.py --report out/samplers.jsonl

The embedded model answers the same prompts in every cell. Each cell is one line of the output, so a run that was
stopped continues where it stopped. Step times are processor times of one thread. Single-round sampling tests the first
child of each node alone (Leviathan et al., 2023); on chains it is multi-round sampling.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from specdecode_worker.commands.comparison import DecodingSteps, accepted_nodes, tokens_per_step
from specdecode_worker.commands.flags import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specdecode_worker.commands.local_engine import LocalEngine, TokenizedPrompt
from specdecode_worker.contract import DraftConfig, EngineConfig, ModelConfig, TreeShape, WorkerConfig
from specdecode_worker.core.messages import Submit
from specdecode_worker.models.fetch import default_cache_dir
from specdecode_worker.sampling.params import Sampling
from specdecode_worker.sampling.sampler import StepSampler

SHAPES = ("chain:3", "chain:5", "tree:3,2,1", "tree:4,2,1")
TEMPERATURES = (0.0, 0.6, 0.8, 1.0)
CONCURRENCY = 8
WITHIN_95_PERCENT = 1.96
"""Standard errors on each side of a mean within which it lies with 95 % confidence."""


MULTI_ROUND = StepSampler.verified


def single_round(
    self: StepSampler, rows: Any, tokens_R: Any, logits_RV: Any, starts: Any, parents_BN: torch.Tensor, depth: int
) -> Any:
    """Accept or reject the first child of each node alone, as `StepSampler.verified`."""
    has_elder_BN = (parents_BN[:, :, None] == parents_BN[:, None, :]).tril(-1).any(-1)
    return MULTI_ROUND(self, rows, tokens_R, logits_RV, starts, parents_BN.masked_fill(has_elder_BN, -1), depth)


def cells(shapes: Sequence[str], temperatures: Sequence[float]) -> Iterator[tuple[str, str, float]]:
    """Yield sampler, shape and temperature of every cell. Greedy cells are the same for all samplers."""
    for sampler in ("coupled", "multi-round", "single-round"):
        for shape in ("none", *shapes) if sampler == "coupled" else shapes:
            for temperature in temperatures:
                same = sampler != "coupled" and (temperature == 0 or (sampler == "single-round" and "chain" in shape))
                if not same:
                    yield sampler, shape, temperature


def load(sampler: str) -> LocalEngine:
    """Load an engine with this sampler."""
    StepSampler.verified = single_round if sampler == "single-round" else MULTI_ROUND  # type: ignore[method-assign]
    config = WorkerConfig(
        model=ModelConfig(uri=EMBEDDED_TARGET, served_name="embedded", max_model_len=1024),
        draft=DraftConfig(method="eagle3", uri=EMBEDDED_DRAFT, required=True),
        engine=EngineConfig(
            max_num_seqs=CONCURRENCY,
            device="cpu",
            threads=1,
            kv_cache_tokens=16_384,
            sampler="coupled" if sampler == "coupled" else "mss",
        ),
    )
    return LocalEngine(config, default_cache_dir())


def answer(
    local: LocalEngine, prompts: Sequence[TokenizedPrompt], sampling: Callable[[int], Sampling]
) -> tuple[list[list[int]], list[list[int]], float]:
    """Answer all prompts; return the accepted nodes of every step by request, the answers, and the mean step time."""
    decoding, answers = DecodingSteps(prompts), [[] for _ in prompts]  # type: tuple[DecodingSteps, list[list[int]]]
    engine, seconds, steps = local.engine, 0.0, 0
    sizes: list[int] = []
    engine.on_launch = lambda rows, prefill: sizes.append(prefill)
    for index, prompt in enumerate(prompts):
        engine.add(Submit(request_id=str(index), prompt=prompt.tokens, sampling=sampling(index)))
    while not engine.idle:
        began = time.process_time()
        sizes.clear()
        for new in engine.step():
            decoding.take(int(new.request_id), new)
            answers[int(new.request_id)] += new.tokens
        if sizes == [0]:
            seconds, steps = seconds + time.process_time() - began, steps + 1
    return [accepted_nodes(own) for own in decoding.by_request], answers, seconds / max(steps, 1)


def measure(flags: argparse.Namespace) -> None:
    """Run all cells that the output file lacks, and append them to it."""
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in flags.out.read_text().splitlines()] if flags.out.exists() else []
    have = {(cell["sampler"], cell["shape"], cell["temperature"]) for cell in done}
    plain = {cell["temperature"]: cell["answers"] for cell in done if cell["shape"] == "none"}
    local, loaded = None, ""
    for sampler, shape, temperature in cells(flags.shapes.split(";"), flags.temperatures):
        if (sampler, shape, temperature) in have:
            continue
        if local is None or loaded != sampler:
            local, loaded = load(sampler), sampler
        prompts = local.prompts(flags.prompts)[:: flags.every]
        local.run_shape(TreeShape.parse(shape))
        walks, answers, seconds = answer(
            local,
            prompts,
            lambda seed, t=temperature: Sampling(max_tokens=flags.max_tokens, temperature=t, seed=seed),
        )
        if shape == "none":
            plain[temperature] = answers
        steps = sum(map(len, walks))
        pace, error = tokens_per_step([(len(own), len(own) + sum(own)) for own in walks]) if steps else (1.0, 0.0)
        cell = {
            "sampler": sampler,
            "shape": shape,
            "temperature": temperature,
            "tokens_per_step": round(pace, 4),
            "bound": round(WITHIN_95_PERCENT * error, 4),
            "steps": steps,
            "step_milliseconds": round(1000 * seconds, 2),
            "prompts": len(prompts),
            "same_text": sum(one == other for one, other in zip(answers, plain[temperature], strict=True)),
            **({"answers": answers} if shape == "none" else {}),
        }
        with flags.out.open("a") as file:
            file.write(json.dumps(cell) + "\n")
        print(line(cell), flush=True)


def line(cell: dict[str, Any]) -> str:
    """Return one row of the table."""
    return (
        f"| {cell['shape']} | {cell['temperature']} | {cell['sampler']} | {cell['tokens_per_step']:.2f} "
        f"± {cell['bound']:.2f} | {cell['step_milliseconds']:.0f} | {cell['same_text']} of {cell['prompts']} |"
    )


def report(path: Path) -> str:
    """Return the table of an output file, ordered by shape, temperature and sampler."""
    found = [json.loads(text) for text in path.read_text().splitlines()]
    found.sort(key=lambda cell: (("none", *SHAPES).index(cell["shape"]), cell["temperature"]))
    head = "| shape | temperature | sampler | tokens per step | step, ms | text of plain decoding |"
    return "\n".join([head, "|" + " --- |" * 6, *map(line, found)])


def main() -> None:
    """Measure, or print the table of an output file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=Path, default=Path("benchmarks/prompts/heldout.jsonl"))
    parser.add_argument("--every", type=int, default=3, help="use every n-th prompt")
    parser.add_argument("--shapes", default=";".join(SHAPES))
    parser.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("out/samplers.jsonl"))
    parser.add_argument("--report", type=Path, help="print the table of an output file, and measure nothing")
    flags = parser.parse_args()
    if flags.report:
        print(report(flags.report))
    else:
        measure(flags)


if __name__ == "__main__":
    main()
