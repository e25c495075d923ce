"""Loading of DFlash heads, in z-lab's layout (z-lab/dflash, dflash/model.py) and in that of speculators.

z-lab's heads share embeddings and output matrix with the target. speculators writes copies of them into the
checkpoint, the output matrix with the rows of the draft's vocabulary only; ``d2t`` and ``t2d`` then map it
(vllm-project/speculators at c05b95b3: src/speculators/models/dflash/core.py for the tensors that are saved, and
``DraftVocabMixin`` of src/speculators/model.py for those of the vocabulary). As in vLLM (vllm-project/vllm,
vllm/model_executor/models/qwen3_dflash.py), a head without a copy reads the target's.
"""

from __future__ import annotations

from pathlib import Path

import torch

from specdecode_worker.models.checkpoints.tensor_placement import UnloadedNetwork, meta_init, open_checkpoint
from specdecode_worker.models.checkpoints.weights import check_vocabulary_map
from specdecode_worker.models.configs.dflash_config import is_speculators
from specdecode_worker.models.configs.model_config import dflash_config, read_config
from specdecode_worker.models.networks.dflash import DFlashHead
from specdecode_worker.models.networks.llama import Llama


def prepare_dflash(folder: Path, target: Llama) -> UnloadedNetwork[DFlashHead]:
    """Return the unloaded DFlash head of ``folder`` for ``target``. Raise ModelError if it does not fit."""
    raw = read_config(folder)
    config, copies = dflash_config(raw, target.config), is_speculators(raw)
    checkpoint = open_checkpoint(folder, lambda name: name.removeprefix("model."))
    mapped = config.draft_vocab_size < config.vocab_size
    with meta_init():
        head = DFlashHead(
            config,
            target,
            own_embedding=copies and "embed_tokens.weight" in checkpoint,
            own_lm_head=mapped or (copies and "lm_head.weight" in checkpoint),
        )
    return UnloadedNetwork(head, checkpoint, spare=frozenset(("t2d",) if mapped else ()))


def load_dflash(folder: Path, target: Llama, *, dtype: torch.dtype, device: torch.device) -> DFlashHead:
    """Load the DFlash head in ``folder`` for ``target``. Raise ModelError if it does not fit."""
    prepared = prepare_dflash(folder, target)
    head = prepared.fill(dtype=dtype, device=device, finite=True)
    if head.target_ids is not None:
        check_vocabulary_map(head.target_ids, head.config.vocab_size, prepared.checkpoint)
    return head
