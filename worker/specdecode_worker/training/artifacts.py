"""Files that a training run writes: weights, config.json and lineage.json."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdecode_worker.files import replacing, write_json
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.config import (
    BlockConfig,
    DFlashConfig,
    Eagle3Config,
    EagleConfig,
    MedusaConfig,
    PEagleConfig,
)
from specdecode_worker.models.dflash import DFlashHead
from specdecode_worker.models.drafts import Draft
from specdecode_worker.models.eagle import Eagle3Head, EagleHead
from specdecode_worker.models.fetch import model_hash, resolve
from specdecode_worker.models.fields import Fields, read_config
from specdecode_worker.training.conversations import Conversation, DataSet, answer_length, shard_paths
from specdecode_worker.training.errors import ResumeMismatch, TrainingError
from specdecode_worker.training.trainer import Trainer
from specdecode_worker.training.unroll import vocabulary_of

# Content of config.json for trained drafts, in the formats that SafeAILab, vLLM, SGLang and speculators read.


def eagle3_config(config: Eagle3Config) -> dict[str, Any]:
    """Return config.json of an EAGLE-3 or P-EAGLE head as SafeAILab, vLLM and SGLang read it."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **_blocks(config, config.num_hidden_layers),
        **_eagle3_fields(config),
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def speculators_config(config: Eagle3Config, verifier: Sequence[str]) -> dict[str, Any]:
    """Return config.json of an EAGLE-3 or P-EAGLE head as speculators writes it.

    The fields of the layers are nested, the others are at the top level. ``verifier`` are the target's architectures.
    """
    kind, name = ("peagle", "PEagleSpeculator") if isinstance(config, PEagleConfig) else ("eagle3", "Eagle3Speculator")
    return {
        "architectures": [name],
        "speculators_model_type": kind,
        **_eagle3_fields(config),
        "transformer_layer_config": {
            "model_type": "llama",
            **_blocks(config, config.num_hidden_layers),
            "vocab_size": config.vocab_size,
        },
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": list(verifier), "name_or_path": None},
        },
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def dflash_config(config: DFlashConfig, target_layers: int) -> dict[str, Any]:
    """Return config.json of a DFlash head as z-lab writes it and vLLM reads it."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **_blocks(config, config.num_hidden_layers),
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": [layer - 1 for layer in config.aux_layers],
        },
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "num_target_layers": target_layers,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


def eagle_config(config: EagleConfig) -> dict[str, Any]:
    """Return config.json of an EAGLE-1 head as SafeAILab and vLLM read it."""
    return {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        **_blocks(config, config.num_hidden_layers),
        "vocab_size": config.vocab_size,
        "bias": bool(config.fc_bias),
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def medusa_config(config: MedusaConfig) -> dict[str, Any]:
    """Return config.json of Medusa heads as vLLM reads it."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        "medusa_fc_bias": True,
        "dtype": "bfloat16",
    }


def _eagle3_fields(config: Eagle3Config) -> dict[str, Any]:
    """Return the fields that only EAGLE-3 and P-EAGLE heads have."""
    fields: dict[str, Any] = {
        "target_hidden_size": config.target_hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
    }
    if isinstance(config, PEagleConfig):
        fields["mask_token_id"] = config.mask_token_id
    for name in ("norm_before_fc", "fc_norm", "norm_output"):
        if getattr(config, name):
            fields[name] = True
    if not config.aux_layers:
        return fields | {"eagle_config": {"use_aux_hidden_state": False}}
    return fields | {"eagle_aux_hidden_state_layer_ids": list(config.aux_layers)}


def _blocks(config: BlockConfig, layers: int) -> dict[str, Any]:
    """Return the fields that describe the shape of the layers."""
    scaling = config.rope_scaling
    fields = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling and {"rope_type": scaling.kind, **asdict(scaling)},
        "max_position_embeddings": config.max_position_embeddings,
    }
    biases = {"attention_bias": config.o_bias, "qkv_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    return fields | {name: True for name, has_bias in biases.items() if has_bias}


# Target and parent of a draft, and the lineage.json beside its weights: its origin and results.


@dataclass(frozen=True, slots=True)
class Ancestor:
    """Target or parent draft: the URI that the user gave, its folder and the hash of its weights."""

    uri: str
    folder: Path
    hash: str

    @classmethod
    def of(cls, uri: str, cache: Path | None) -> Ancestor:
        """Resolve a model URI and hash its weights. Raise ModelError or TrainingError if there is no model to read."""
        folder = resolve(uri, cache)
        try:
            return cls(uri, folder, model_hash(folder))
        except OSError as error:
            raise TrainingError(f"{uri} cannot be read: {error}") from error


def check_same_target(out: Path, target: Ancestor) -> None:
    """Check that work in ``out`` goes on with the target that it began with, whose states its data hold.

    Raises:
        ResumeMismatch: The target has other weights by now.
    """
    path = out / "target.json"
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        write_json(path, {"uri": target.uri, "hash": target.hash})
    if (began := json.loads(path.read_text())["hash"]) != target.hash:
        raise ResumeMismatch(
            f"{out} was begun with the target {began}, and {target.uri} is {target.hash} now; name another --out"
        )


def read_lineage(folder: Path) -> dict[str, Any]:
    """Return the lineage of the draft in ``folder``, empty if it has none.

    Raises:
        TrainingError: The file is not valid JSON.
    """
    path = folder / "lineage.json"
    if not path.exists():
        return {}
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise TrainingError(f"{path} is no JSON: {error}") from None
    return document


def lineage(
    trainer: Trainer, *, method: str, target: Ancestor, parent: Ancestor | None, uncovered: dict[str, float]
) -> dict[str, Any]:
    """Return the content of lineage.json."""
    history = trainer.progress.history
    vocabulary = vocabulary_of(trainer.head, len(trainer.output_VE))
    return {
        "method": method,
        "target": {"uri": target.uri, "hash": target.hash},
        "parent": {"uri": parent.uri, "hash": parent.hash} if parent else None,
        "data": _described(trainer.data),
        "vocabulary": {"size": len(vocabulary), "uncovered": uncovered},
        "settings": asdict(trainer.settings),
        "results": max(history, key=lambda line: line["tokens_per_step"], default={}),
        "history": history,
    }


def _described(data: DataSet) -> dict[str, Any]:
    """Return a summary of the data.

    ``window`` spans the modification times of the shards. ``hash`` covers the tokens of all conversations.
    """
    every = [*data.training, *data.validation]
    times = [path.stat().st_mtime for path in shard_paths(data.folder)]
    tokens: Counter[str] = Counter()
    for conversation in every:
        tokens[conversation.domain] += answer_length(conversation)
    return {
        "conversations": len(every),
        "validation": len(data.validation),
        "answer_tokens": tokens.total(),
        "by_domain": dict(sorted(tokens.items())),
        "window": [_moment(min(times)), _moment(max(times))] if times else [],
        "hash": _hash(every),
    }


def _hash(conversations: Sequence[Conversation]) -> str:
    """Return 16 hex digits of SHA-256 over the tokens of all conversations."""
    digest = hashlib.sha256()
    for conversation in conversations:
        digest.update(len(conversation.tokens_N).to_bytes(4) + conversation.tokens_N.numpy().tobytes())
    return digest.hexdigest()[:16]


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


# Export of a trained draft as a folder that inference engines load: config.json and bf16 weights.
#
# EAGLE-3 and P-EAGLE heads can be written with the tensor names of SafeAILab, speculators or NeMo. EAGLE-1 heads get
# SafeAILab's names, DFlash heads z-lab's, Medusa heads vLLM's, and a draft model its target's.

Names = Literal["safeailab", "speculators", "nemo"]
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def write_draft(draft: Draft, folder: Path, target_folder: Path, names: Names = "safeailab") -> None:
    """Write config.json and model.safetensors of a draft of any method. A reader never sees a partial file."""
    if isinstance(draft, Eagle3Head):
        verifier = Fields(read_config(target_folder)).texts("architectures") if names == "speculators" else ()
        write_head(draft, folder, names, verifier)
        return
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _rounded(draft)
    if isinstance(draft, CausalLM):
        document = {
            **read_config(target_folder),
            "num_hidden_layers": draft.config.num_hidden_layers,
            "dtype": "bfloat16",
        }
        if draft.config.tie_word_embeddings:
            tensors.pop("lm_head.weight")
        for name in _TOKENIZER:
            if (target_folder / name).exists():
                shutil.copy(target_folder / name, folder / name)
    elif isinstance(draft, DFlashHead):
        document = dflash_config(draft.config, read_config(target_folder)["num_hidden_layers"])
    elif isinstance(draft, EagleHead):
        document = eagle_config(draft.config)
    else:
        document = medusa_config(draft.config)
    _save(tensors, folder)
    write_json(folder / "config.json", document)


def write_head(head: Eagle3Head, folder: Path, names: Names = "safeailab", verifier: Sequence[str] = ()) -> None:
    """Write an EAGLE-3 or P-EAGLE head, in the names of speculators with the target's architectures (``verifier``).

    ``d2t`` and ``t2d`` are omitted if the draft vocabulary is the target's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _rounded(head)
    if head.config.draft_vocab_size < head.config.vocab_size:
        known = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        known[head.target_ids] = True
        tensors["t2d"] = known
    else:
        tensors.pop("d2t")
    _save({_renamed(name, names): tensor for name, tensor in tensors.items()}, folder)
    nested = names == "speculators"
    document = speculators_config(head.config, verifier) if nested else eagle3_config(head.config)
    write_json(folder / "config.json", document)


def _renamed(name: str, names: Names) -> str:
    """Return the tensor name in the family ``names``. Only the names of layers differ."""
    prefix = {"safeailab": "midlayer.", "speculators": "layers.0.", "nemo": "model.layers.0."}[names]
    name = re.sub(r"^midlayer\.", prefix, name)
    return re.sub(r"^layers\.", "model.layers.", name) if names == "nemo" else name


def _rounded(draft: Draft) -> dict[str, Tensor]:
    """Return the weights of ``draft`` in bf16; integer tensors stay as they are."""
    return {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in draft.state_dict().items()
    }


def _save(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write model.safetensors."""
    with replacing(folder / "model.safetensors") as partial:
        save_file(tensors, partial, {"format": "pt"})
        partial.chmod(0o644)  # safetensors writes files that only their owner can read; a worker is often another user
