"""Records how sure the draft head was of each token that it proposed, beside whether the target said it.

    python benchmarks/pricing/record.py --out out/confidence.npz

The target answers prompts/heldout.jsonl, greedily and at a temperature; replay then asks the head at every root and
depth of those texts. Of each proposal there is whether it was right, its probability (of the law that is drafted
from), and by how much it won: the distance of the two best scores, noise included where text is sampled. About ten
minutes on one core.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specdecode_kernels.noise.op import gumbel
from specdecode_worker.capture import Record, opening_hash
from specdecode_worker.commands.flags import EMBEDDED_DRAFT, EMBEDDED_TARGET, add_model_flags
from specdecode_worker.commands.local_engine import LocalEngine, TokenizedPrompt, local_engine
from specdecode_worker.contract import TreeShape
from specdecode_worker.drafts.draft_files import read_calibration
from specdecode_worker.models.fetch import model_hash, resolve
from specdecode_worker.models.weights import load_causal_lm, load_head, prepare_eagle3
from specdecode_worker.sampling.params import Sampling
from specdecode_worker.training.conversations import Conversation
from specdecode_worker.training.evaluation import CalibratedDraft
from specdecode_worker.training.replay import Replayed, replay
from specdecode_worker.training.unroll import make_batch, unroll

DEPTH = 7
_PROMPTS = Path(__file__).parents[1] / "prompts" / "heldout.jsonl"
_TOGETHER = 16


def main() -> None:
    args = _arguments()
    engine = local_engine(args, max_num_seqs=_TOGETHER)
    prompts = engine.prompts(_PROMPTS)
    target = load_causal_lm(resolve(EMBEDDED_TARGET, None), dtype=torch.float32, device=torch.device("cpu"))
    folder = resolve(EMBEDDED_DRAFT, None)
    head = load_head(prepare_eagle3(folder, target), target, dtype=torch.float32, device=torch.device("cpu"))
    draft = CalibratedDraft(head, read_calibration(folder).sharpness)
    parts: list[dict[str, np.ndarray]] = []
    for temperature in args.temperatures:
        for index, record in enumerate(_records(engine, prompts, temperature, args.max_tokens)):
            found = replay(target, record)
            if isinstance(found, Replayed):
                parts.append(_confidence(draft, found.conversation, record))
            print(f"T {temperature}: {index + 1} of {len(prompts)} answers", file=sys.stderr, flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    names = ("hit", "margin", "top")
    columns = {name: np.concatenate([part[name] for part in parts]) for name in names}
    np.savez_compressed(
        args.out,
        **columns,
        lengths=np.array([len(part["hit"]) for part in parts]),
        domains=np.array([str(part["domain"]) for part in parts]),
        temperatures=np.array([float(part["temperature"]) for part in parts]),
        draft=model_hash(folder),
    )


def _records(engine: LocalEngine, prompts: list[TokenizedPrompt], temperature: float, most: int) -> Iterator[Record]:
    engine.run_shape(TreeShape.chain(3))
    how = [Sampling(max_tokens=most, temperature=temperature, seed=seed) for seed in range(len(prompts))]
    for prompt, sampling, answer in zip(prompts, how, engine.answer(prompts, how)[0], strict=True):
        if len(answer.tokens) > DEPTH + 1:
            yield Record(
                tokens=(*prompt.tokens, *answer.tokens),
                prompt_length=len(prompt.tokens),
                sampling=sampling,
                target=EMBEDDED_TARGET,
                task=prompt.domain,
                time_seconds=time.time(),
                opening=opening_hash(str(prompt.tokens)),
            )


@torch.inference_mode()
def _confidence(draft: CalibratedDraft, conversation: Conversation, record: Record) -> dict[str, np.ndarray]:
    """hit, margin, top: [roots, DEPTH]; roots too near the end for the deepest token are left out."""
    head = draft.head
    first, temperature = record.prompt_length, record.sampling.temperature
    wanted_A = torch.tensor(record.tokens[first + 1 :])
    count = len(wanted_A)
    noise_AV = None
    if temperature > 0:
        seed_A = torch.full((count,), record.sampling.seed, dtype=torch.int64)
        size = int(head.target_ids.max()) + 1
        noise_AV = gumbel(seed_A, first + 1 + torch.arange(count), size)[:, head.target_ids]
    columns: dict[str, list[Tensor]] = {"hit": [], "margin": [], "top": []}
    states = unroll(head, make_batch([conversation], torch.float32), DEPTH)
    for k, (state_BAE, _) in enumerate(states):
        logits_AV = head.logits(state_BAE[0][:count]).double()
        if noise_AV is not None:
            logits_AV = logits_AV * draft.factor(k) / temperature
        logp_AV = logits_AV.log_softmax(-1)
        score_AV = logp_AV if noise_AV is None else logp_AV + noise_AV
        best = score_AV.topk(2, dim=-1)
        proposed_A = best.indices[:, 0]
        columns["hit"].append(head.target_ids[proposed_A] == wanted_A)
        columns["margin"].append(best.values[:, 0] - best.values[:, 1])
        columns["top"].append(logp_AV.gather(-1, proposed_A[:, None])[:, 0].exp())
    whole = count - DEPTH
    by_root = {
        name: np.stack([at.numpy()[k : k + whole] for k, at in enumerate(found)], axis=1)
        for name, found in columns.items()
    }
    return {**by_root, "domain": np.array(record.task), "temperature": np.array(temperature)}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_flags(parser)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
