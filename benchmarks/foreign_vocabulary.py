"""Draft models with another vocabulary against the same draft with the target's: tokens per step and equal texts.

    python benchmarks/foreign_vocabulary.py --out out/foreign-vocabulary.jsonl
    python benchmarks/foreign_vocabulary.py --report out/foreign-vocabulary.jsonl

The draft is the embedded target without some of its layers. Its copies have the same weights, but their tokenizers have
other ids, and some lack a share of the target's tokens, which every n-th token of the vocabulary is, and have foreign
ones instead. Tokens are matched by their bytes (models/vocabulary.py). All drafts answer the same prompts at the same
seeds, and the texts are compared with those of plain decoding. A draft with a shape and a temperature is one line of
the output, so a run that was stopped continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import described

from specdecode_worker.commands.comparison import Walks
from specdecode_worker.commands.flags import EMBEDDED_TARGET
from specdecode_worker.commands.local_engine import LocalEngine
from specdecode_worker.contract import DraftConfig, Dtype, EngineConfig, ModelConfig, TreeShape, WorkerConfig
from specdecode_worker.models.arch import causal_lm_config
from specdecode_worker.models.config import read_config
from specdecode_worker.models.drafts import match_draft_model
from specdecode_worker.models.fetch import default_cache_dir, resolve
from specdecode_worker.sampling.params import Sampling

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.lossless.permuted_draft import write_permuted_draft

LEFT_OUT = range(20, 23)
"""Layers of the target that the draft lacks, so that not all of its proposals are right."""
CONCURRENCY = 8
WITHIN_95_PERCENT = 1.96
KEPT = 1000
"""First ids of the target that every draft has: bytes and the most frequent tokens."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Vocabulary of a draft: the seed of its ids, the share that it lacks, and the number of its foreign tokens."""

    name: str
    seed: int | None = None
    nth_lacks: int = 0
    """The draft lacks every n-th token behind the first ones; 0 for none."""
    foreign: int = 0

    def lacks(self) -> Callable[[int, str], bool]:
        """Return a function that takes an id and its token, and returns whether the draft lacks it."""
        return lambda index, token: bool(self.nth_lacks) and index > KEPT and index % self.nth_lacks == 0


VOCABULARIES = (
    Vocabulary("the target's"),
    Vocabulary("the same tokens, other ids", 1),
    Vocabulary("without a tenth of the tokens", 2, 10, 500),
    Vocabulary("without a fifth of the tokens", 3, 5, 500),
    Vocabulary("without half of the tokens", 4, 2, 500),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=Path, default=Path("benchmarks/prompts/heldout.jsonl"))
    parser.add_argument("--every", type=int, default=3, help="use every n-th prompt")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--shapes", nargs="+", default=["chain:3", "tree:3,2,1"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--out", type=Path, default=Path("out/foreign-vocabulary.jsonl"))
    parser.add_argument("--report", type=Path, help="print the table of an output file, and measure nothing")
    flags = parser.parse_args()
    logging.disable(logging.WARNING)
    if flags.report:
        print(report(flags.report))
    else:
        measure(flags)


def measure(flags: argparse.Namespace) -> None:
    """Run all cells that the output file lacks, and append them to it."""
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in flags.out.read_text().splitlines()] if flags.out.exists() else []
    have = {(cell["vocabulary"], cell["shape"], cell["temperature"]) for cell in done}
    plain: dict[float, list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as base:
        for vocabulary in VOCABULARIES:
            wanted = [(shape, t) for shape in flags.shapes for t in flags.temperatures]
            missing = [cell for cell in wanted if (vocabulary.name, *cell) not in have]
            if missing:
                folder = write_draft(Path(base) / f"draft-{vocabulary.seed}", vocabulary)
                local, coverage = load(folder, flags.dtype), coverage_of(folder)
                for shape, temperature in missing:
                    if temperature not in plain:
                        plain[temperature] = answer(local, "none", temperature, flags)["answers"]
                    found = answer(local, shape, temperature, flags)
                    answers = found.pop("answers")
                    found |= {
                        "same_text": sum(a == b for a, b in zip(answers, plain[temperature], strict=True)),
                        "coverage": round(coverage, 3),
                    }
                    append(flags.out, {"vocabulary": vocabulary.name, "shape": shape, **found, **described()})


def write_draft(folder: Path, vocabulary: Vocabulary) -> Path:
    """Write the draft with this vocabulary."""
    return write_permuted_draft(
        folder,
        resolve(EMBEDDED_TARGET, default_cache_dir()),
        layers=LEFT_OUT,
        seed=vocabulary.seed,
        lacks=vocabulary.lacks(),
        foreign=vocabulary.foreign,
    )


def coverage_of(folder: Path) -> float:
    """Return the share of the target's tokens of a sample text that the draft in ``folder`` has."""
    target = resolve(EMBEDDED_TARGET, default_cache_dir())
    match = match_draft_model(target, causal_lm_config(read_config(target)).vocab_size, folder, None)
    return 1.0 if match is None else match.coverage


def load(folder: Path, dtype: Dtype) -> LocalEngine:
    """Load an engine with the draft in ``folder``."""
    config = WorkerConfig(
        model=ModelConfig(uri=EMBEDDED_TARGET, served_name="embedded", dtype=dtype, max_model_len=1024),
        draft=DraftConfig(method="draft-model", uri=f"file://{folder.resolve()}", required=True),
        engine=EngineConfig(max_num_seqs=CONCURRENCY, device="cpu", threads=1, kv_cache_tokens=8192),
    )
    return LocalEngine(config, default_cache_dir())


def answer(local: LocalEngine, shape: str, temperature: float, flags: argparse.Namespace) -> dict[str, Any]:
    """Answer all prompts with one shape at one temperature, and return the figures with the answers."""
    prompts = local.prompts(flags.prompts)[:: flags.every]
    local.run_shape(TreeShape.parse(shape))
    walks = Walks.of(len(prompts))
    how = [Sampling(max_tokens=flags.max_tokens, temperature=temperature, seed=seed) for seed in range(len(prompts))]
    answers, _ = local.answer(prompts, how, walks.take)
    return {
        "temperature": temperature,
        "tokens_per_step": round(walks.tokens_per_step, 4),
        "bound": round(WITHIN_95_PERCENT * walks.standard_error, 4),
        "steps": walks.steps,
        "prompts": len(prompts),
        "max_tokens": flags.max_tokens,
        "dtype": flags.dtype,
        "answers": [one.tokens for one in answers],
    }


def append(path: Path, cell: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(cell) + "\n")
    print(cell, flush=True)


def report(path: Path) -> str:
    """Return the table of an output file: a row for each vocabulary, a column for each shape and temperature."""
    cells = [json.loads(line) for line in path.read_text().splitlines()]
    columns = list(dict.fromkeys((cell["shape"], cell["temperature"]) for cell in cells))
    heads = " | ".join(f"{shape} at {temperature:g}" for shape, temperature in columns)
    lines = [f"| draft's vocabulary | coverage | {heads} | texts of plain decoding |"]
    lines.append("|" + " --- |" * (3 + len(columns)))
    for name in dict.fromkeys(cell["vocabulary"] for cell in cells):
        mine = {(cell["shape"], cell["temperature"]): cell for cell in cells if cell["vocabulary"] == name}
        parts = [f"{mine[c]['tokens_per_step']:.2f} ± {mine[c]['bound']:.2f}" if c in mine else "" for c in columns]
        same, every = (sum(cell[key] for cell in mine.values()) for key in ("same_text", "prompts"))
        coverage = next(iter(mine.values()))["coverage"]
        lines.append(f"| {name} | {100 * coverage:.0f} % | {' | '.join(parts)} | {same} of {every} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
