"""Records where the target's tokens stood in the draft head's ordering, for the simulator: one line an answer.

    python benchmarks/record_ranks.py > benchmarks/recordings/ranks-smollm2.json

The text does not depend on the draft, so one teacher-forced pass a depth over the target's greedy answers to
prompts/heldout.jsonl gives the rank at every root and depth
(specdecode_worker.training.acceptance). ``ranks`` of an answer has one word per depth, a digit per
root: 0-7 is the rank, 8 a miss. About three minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from machine import described

from specdecode_worker.commands.flags import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specdecode_worker.models.fetch import model_hash, resolve
from specdecode_worker.models.weights import load_causal_lm, load_head, prepare_eagle3
from specdecode_worker.training.acceptance import target_token_ranks
from specdecode_worker.training.conversations import Chat
from specdecode_worker.training.prompts import greedy, read_prompts
from specdecode_worker.training.rollout import Rollout, RolloutSettings, conversation_of
from specdecode_worker.training.split_target import TargetPlacement, target_engine

DEPTH = 8
PROMPTS = Path(__file__).parent / "prompts" / "heldout.jsonl"
ROWS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=256, help="of an answer at most (default: %(default)s)")
    args = parser.parse_args()
    folder, draft = resolve(EMBEDDED_TARGET, None), resolve(EMBEDDED_DRAFT, None)
    target = load_causal_lm(folder, dtype=torch.float32, device=torch.device("cpu"))
    head = load_head(prepare_eagle3(draft, target), target, dtype=torch.float32, device=torch.device("cpu"))
    questions = list(greedy(lines := read_prompts(PROMPTS), Chat(folder)))
    settings = RolloutSettings(rows=2 * ROWS, answer_tokens=args.tokens, for_training=False)
    placement = TargetPlacement(folder=folder, dtype="float32", device=torch.device("cpu"))
    longest = max(len(question.ids or ()) for question in questions) + args.tokens
    with target_engine(placement, rows=settings.rows, longest=longest) as engine:
        texts = list(Rollout(engine, settings, iter(questions)).texts())
    answers: list[dict[str, Any]] = []
    waiting = []
    for text in texts:
        waiting.append(conversation_of(target, text))
        if len(waiting) == ROWS:
            answers += _recorded(head, waiting, target.lm_head.weight)
            waiting = []
        print(f"{len(answers) + len(waiting)} of {len(lines)} answers", file=sys.stderr, flush=True)
    answers += _recorded(head, waiting, target.lm_head.weight) if waiting else []
    document = {
        "kind": "ranks",
        "target": EMBEDDED_TARGET,
        "draft": {"uri": EMBEDDED_DRAFT, "hash": model_hash(draft)},
        "prompts": f"benchmarks/prompts/{PROMPTS.name}",
        "command": "python benchmarks/record_ranks.py",
        **described(),
        "depth": DEPTH,
        "answers": sorted(answers, key=lambda answer: (answer["domain"], answer["ranks"][0])),
    }
    print(json.dumps(document, indent=1))


def _recorded(head: Any, conversations: list[Any], output_VE: Any) -> list[dict[str, Any]]:
    """Roots whose deepest token lies beyond the end of the answer are left out: it would count as a miss."""
    found = []
    for conversation, ranks_IK in zip(
        conversations, target_token_ranks(head, conversations, output_VE, DEPTH), strict=True
    ):
        whole = ranks_IK[: max(len(ranks_IK) - DEPTH, 0)]
        if len(whole) >= DEPTH:
            words = ["".join(map(str, column)) for column in whole.T.tolist()]
            found.append({"domain": conversation.domain, "ranks": words})
    return found


if __name__ == "__main__":
    main()
