"""Merged drafts against each of them alone: tokens per step and processor time.

    python benchmarks/merged.py --out out/merged.jsonl

The workloads are those of suffix.py, and `mixed`: edits and questions in turn. All ways answer the same requests at the
same seeds, so the texts are equal. A workload with a way is one line of the output, and an interrupted run continues
where it ended. Times are processor times of one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from suffix import agent, editing

from specdecode_worker.commands.bench import QUESTIONS
from specdecode_worker.commands.flags import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specdecode_worker.commands.local_engine import LocalEngine
from specdecode_worker.contract import (
    DraftConfig,
    EngineConfig,
    MergedDraft,
    ModelConfig,
    NamedDraft,
    TreeShape,
    WorkerConfig,
)
from specdecode_worker.core.messages import Submit
from specdecode_worker.models.fetch import default_cache_dir
from specdecode_worker.sampling.params import Sampling


def mixed(local: LocalEngine) -> list[tuple[Sequence[int], str]]:
    """Return the prompts of edits and questions in turn, without grammars."""
    questions = [(local.tokenizer.chat([{"role": "user", "content": text}]), "") for text in QUESTIONS]
    return [prompt for pair in zip(editing(local)[:4], questions, strict=False) for prompt in pair]


WORKLOADS = {"editing": editing, "mixed": mixed, "agent": agent}
WAYS: dict[str, tuple[str, tuple[MergedDraft, ...], str]] = {
    "plain": ("", (), "none"),
    "head": ("", (), "chain:3"),
    "head, tree": ("", (), "tree:3,2,1"),
    "ngram": ("ngram", (), "chain:8"),
    "suffix": ("suffix", (), "chain:8"),
    "head + ngram, tree": ("", (MergedDraft(draft="ngram"),), "tree:3,2,1"),
    "head + ngram:8": ("", (MergedDraft(draft="ngram", depth=8),), "chain:3"),
    "head + suffix:8": ("", (MergedDraft(draft="suffix", depth=8),), "chain:3"),
}
"""Draft, drafts that are merged with it, and shape of each way."""


def load() -> LocalEngine:
    """Load the embedded model with its head, prompt lookup and suffix decoding."""
    config = WorkerConfig(
        model=ModelConfig(uri=EMBEDDED_TARGET, served_name="embedded", max_model_len=1024),
        draft=DraftConfig(method="eagle3", uri=EMBEDDED_DRAFT, required=True),
        drafts=(NamedDraft(name="ngram", method="ngram"), NamedDraft(name="suffix", method="suffix")),
        engine=EngineConfig(max_num_seqs=2, device="cpu", threads=1, kv_cache_tokens=4096),
    )
    return LocalEngine(config, default_cache_dir())


def answer(local: LocalEngine, prompts: Sequence[tuple[Sequence[int], str]], most: int, way: str) -> dict[str, Any]:
    """Answer the prompts one after the other, and return the figures. Earlier answers are those of this way alone."""
    rates, spent, texts, all_steps = [], 0.0, [], 0
    for index, (prompt, grammar) in enumerate(prompts):
        sampling = Sampling(max_tokens=most, seed=index, temperature=0.0, grammar=grammar)
        local.engine.add(Submit(request_id=str(index), prompt=tuple(prompt), sampling=sampling, cache_salt=way))
        text: list[int] = []
        steps = 0
        while not local.engine.idle:
            began = time.process_time()
            new = local.engine.step()
            if text:  # the prompt is left out
                spent += time.process_time() - began
                steps += bool(new)
            text += [token for one in new for token in one.tokens]
        texts.append(text)
        all_steps += steps
        rates.append((len(text) - 1) / max(steps, 1))
    made = sum(len(text) - 1 for text in texts)
    return {
        "tokens_per_step": round(made / all_steps, 3),
        "median": round(statistics.median(rates), 3),
        "least": round(min(rates), 3),
        "most": round(max(rates), 3),
        "processor_milliseconds_per_token": round(1e3 * spent / made, 2),
        "requests": len(prompts),
        "tokens": made,
        "texts": texts,
    }


def main() -> None:
    """Measure the lines that the output file lacks, and print all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--ways", default=";".join(WAYS))
    parser.add_argument("--out", type=Path, default=Path("out/merged.jsonl"))
    flags = parser.parse_args()
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(text) for text in flags.out.read_text().splitlines()] if flags.out.exists() else []
    have = {(row["workload"], row["way"]) for row in done}
    local = load()
    print(
        "| workload | way | shape | tokens per step | median (range) of requests | ms per token | same text |\n|"
        + " --- |" * 7
    )
    for workload in flags.workloads.split(","):
        for way in flags.ways.split(";"):
            if (workload, way) not in have:
                draft, merge, shape = WAYS[way]
                local.run_shape(TreeShape.parse(shape), draft, merge)
                figures = answer(local, WORKLOADS[workload](local), flags.max_tokens, f"{workload}/{way}")
                done.append({"workload": workload, "way": way, "shape": shape, **figures})
                with flags.out.open("a") as file:
                    file.write(json.dumps(done[-1]) + "\n")
            row = next(r for r in done if (r["workload"], r["way"]) == (workload, way))
            first = next(r for r in done if r["workload"] == workload)
            print(
                f"| {workload} | {way} | {row['shape']} | {row['tokens_per_step']:.2f} "
                f"| {row['median']:.2f} ({row['least']:.2f} to {row['most']:.2f}) "
                f"| {row['processor_milliseconds_per_token']:.1f} | {row['texts'] == first['texts']} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
