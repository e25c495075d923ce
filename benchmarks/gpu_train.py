"""Page, figures and pieces of a draft that hack/gpu-train trained.

    python benchmarks/gpu_train.py --run DIR --from URI --out DIR

It writes OUT/gpu-train.json, OUT/gpu-train.md, and the draft's folder as an archive in pieces of at most PIECE_BYTES,
because a machine with a GPU may return small files only: ``cat OUT/draft.tar.* | tar x``.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import torch
from machine import described

PIECE_BYTES = 15_000_000
GOAL = 2.5
"""Tokens per step of a chain of 3 on held-out prompts that the embedded draft should reach."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--from", dest="origin", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    figures = {**described(), "device": device(), "commit": os.environ.get("SPECDECODE_COMMIT", "unknown")}
    figures |= {"from": args.origin, **compared(args.run)}
    (args.out / "gpu-train.json").write_text(json.dumps(figures, indent=1) + "\n")
    (args.out / "gpu-train.md").write_text(page(figures))
    count = write_pieces(args.run / "head", args.out)
    print(f"{page(figures)}\nThe draft: {args.out}/draft.tar.* ({count} pieces)")


def device() -> str:
    """Return the name of the GPU, or that there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def compared(run: Path) -> dict[str, Any]:
    """Return the tokens per step before and after by domain, and the validations of the training."""
    before, after = (json.loads((run / f"{name}.json").read_text())["runs"][0] for name in ("before", "after"))
    domains = {
        name: {"before": before["domains"][name]["tokens_per_step"], "after": part["tokens_per_step"]}
        for name, part in after["domains"].items()
    }
    overall = {"before": before["overall"]["tokens_per_step"], "after": after["overall"]["tokens_per_step"]}
    history = json.loads((run / "history.json").read_text())
    return {"tokens_per_step": overall, "domains": domains, "goal": GOAL, "history": history}


def page(figures: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    overall = figures["tokens_per_step"]
    lines = [
        f"# Draft trained on {figures['device']}, {figures['date']}",
        "",
        f"From {figures['from']}, commit {figures['commit'][:12]}. Tokens per step of a chain of 3, greedy answers to",
        f"prompts that training never saw; the goal is {figures['goal']}.",
        "",
        "| prompts | before | after |",
        "|---|---|---|",
        *(f"| {name} | {part['before']:.2f} | {part['after']:.2f} |" for name, part in figures["domains"].items()),
        f"| all | {overall['before']:.2f} | {overall['after']:.2f} |",
    ]
    return "\n".join(lines) + "\n"


def write_pieces(head: Path, out: Path) -> int:
    """Write the folder as pieces of one archive and return their number."""
    for old in out.glob("draft.tar.*"):
        old.unlink()
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(head, arcname="head")
    whole = archive.getvalue()
    pieces = [whole[start : start + PIECE_BYTES] for start in range(0, len(whole), PIECE_BYTES)]
    for number, piece in enumerate(pieces):
        (out / f"draft.tar.{number}").write_bytes(piece)
    return len(pieces)


if __name__ == "__main__":
    main()
