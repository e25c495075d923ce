"""Loading of networks from model folders: tensor names per kind of checkpoint, and the tensors that may be absent."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from specdecode_kernels.rope_cache.reference import Scales
from specdecode_worker.models.adapter import adapted
from specdecode_worker.models.arch import architecture_of, causal_lm_config, new_network
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.checkpoint import Checkpoint, open_checkpoint
from specdecode_worker.models.config import (
    Eagle3Config,
    dflash_config,
    eagle3_config,
    eagle_config,
    is_speculators,
    medusa_config,
    peagle_config,
)
from specdecode_worker.models.dflash import DFlashHead
from specdecode_worker.models.eagle import Eagle3Head, EagleHead, PEagleHead
from specdecode_worker.models.errors import WeightMismatch
from specdecode_worker.models.fields import end_tokens, read_config
from specdecode_worker.models.formats import find_matrix, quantization_facts
from specdecode_worker.models.linear import Linear
from specdecode_worker.models.medusa import MedusaHeads
from specdecode_worker.models.unloaded import UnloadedNetwork, meta_init

# Loading of networks from model folders: tensor names per kind of checkpoint, and the tensors that may be absent.
#
# ``prepare_*`` check config.json against its bounds and read the tensor headers only; they return an
# `UnloadedNetwork`, whose `check` compares both. ``load_*`` read the weights as well. All tensor renames of the known
# checkpoint families are in this module. Every function raises ConfigMismatch or WeightMismatch, with a message that
# names the field or tensor.

AnyHead = Eagle3Head | EagleHead | DFlashHead | MedusaHeads
Head = TypeVar("Head", bound=AnyHead)
_Eagle3 = TypeVar("_Eagle3", bound=Eagle3Head)
_KV_SCALE = re.compile(
    r"model\.layers\.(\d+)\.self_attn\.(?:attn\.)?(?:([kv])_proj\.)?(?:(k|v|kv|q|prob)|output)_scale"
)
"""Scales of a KV cache in fp8, by layer, as their writers name them; those of queries and probabilities are spare."""
_EMBEDDING, _OUTPUT = "embed_tokens.weight", "lm_head.weight"


def prepare_causal_lm(folder: Path, *, max_model_len: int | None = None) -> UnloadedNetwork[CausalLM]:
    """Return the unloaded target, or draft model, of ``folder`` for texts of up to ``max_model_len`` tokens."""
    raw = read_config(folder)
    config, facts = causal_lm_config(raw, max_model_len), quantization_facts(folder, raw)
    # Some folders name end tokens that the model has no embedding for; it never emits them.
    ends = tuple(token for token in end_tokens(folder, config.eos_token_ids) if token < config.vocab_size)
    config = replace(config, eos_token_ids=ends)
    architecture = architecture_of(config)
    checkpoint = open_checkpoint(folder, architecture.tensor_name, architecture.entries)
    if config.tie_word_embeddings and _has_own_output(checkpoint):
        config = replace(config, tie_word_embeddings=False)  # as in transformers, the file has the last word
    checkpoint = adapted(checkpoint, architecture_of(config).tensor_name, tied=config.tie_word_embeddings)
    with meta_init():
        model = new_network(config)
    for name, linear in model.named_modules():
        if isinstance(linear, Linear) and (name, config.tie_word_embeddings) != ("lm_head", True):
            shape = linear.out_features, linear.in_features
            linear.source = find_matrix(checkpoint, name, shape, facts, bias=linear.bias is not None)
    forms = Counter(linear.form for linear in model.modules() if isinstance(linear, Linear) and linear.source)
    model.form = next((form for form, _ in forms.most_common(1)), "")
    model.kv_scales, spare = _kv_scales(checkpoint, config.num_hidden_layers)
    if not config.tie_word_embeddings:
        return UnloadedNetwork(model, checkpoint, spare=spare)
    # A tied checkpoint may repeat the matrix as lm_head; the embedding is used.
    return UnloadedNetwork(model, checkpoint.without(_OUTPUT), frozenset((_OUTPUT,)), spare)


def _kv_scales(checkpoint: Checkpoint, layers: int) -> tuple[tuple[Scales, ...], frozenset[str]]:
    """Return the scales of keys and values of each layer, 1 where the checkpoint has none, and their tensors' names.

    A tensor of several numbers, which are scales of heads, is NaN: caches have one scale.
    """
    found = {name: match for name in checkpoint.tensors if (match := _KV_SCALE.fullmatch(name))}
    scales = [dict.fromkeys("kv", 1.0) for _ in range(layers)]
    for name, tensor in checkpoint.read_all(found):
        layer, whose = int(found[name][1]), found[name][3] or found[name][2]
        if whose not in ("k", "v", "kv") or layer >= layers:
            continue
        scales[layer] |= dict.fromkeys(whose, tensor.item() if tensor.numel() == 1 else math.nan)
    return tuple(Scales(one["k"], one["v"]) for one in scales), frozenset(found)


def _has_own_output(checkpoint: Checkpoint) -> bool:
    """Return whether there is an lm_head other than a copy of the embedding; if so, both are read for it."""
    name = f"model.{_EMBEDDING}"
    if _OUTPUT not in checkpoint:
        return any(tensor.startswith("lm_head.") for tensor in checkpoint.tensors)
    return name not in checkpoint or not torch.equal(checkpoint.read(name), checkpoint.read(_OUTPUT))


def load_causal_lm(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None = None,
    stored: bool | None = None,
) -> CausalLM:
    """Load the target in ``folder``; ``stored`` is that of `UnloadedNetwork.fill`."""
    prepared = prepare_causal_lm(folder, max_model_len=max_model_len)
    return fill_causal_lm(prepared, dtype=dtype, device=device, stored=stored)


def fill_causal_lm(
    prepared: UnloadedNetwork[CausalLM],
    *,
    dtype: torch.dtype,
    device: torch.device,
    finite: bool = False,
    stored: bool | None = None,
) -> CausalLM:
    """Load the weights of a target or draft model as `UnloadedNetwork.fill` does, and bring them into their layout."""
    model = prepared.fill(dtype=dtype, device=device, finite=finite, stored=stored)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.arrange()
    return model


def prepare_eagle3(folder: Path, target: CausalLM) -> UnloadedNetwork[Eagle3Head]:
    """Return the unloaded EAGLE-3 head of ``folder`` for ``target``."""
    return _prepared(Eagle3Head, eagle3_config(read_config(folder), target.config), folder, target)


def _prepared(kind: type[_Eagle3], config: Eagle3Config, folder: Path, target: CausalLM) -> UnloadedNetwork[_Eagle3]:
    """Return the unloaded head of ``folder``, an EAGLE-3 head or one that extends it by further tensors."""
    checkpoint = open_checkpoint(folder, _eagle3_name)
    own = _EMBEDDING in checkpoint
    if not own and config.hidden_size != target.config.hidden_size:
        raise WeightMismatch(
            f"{folder}: {_EMBEDDING} is missing; a head of hidden_size {config.hidden_size} cannot use the target's "
            f"embeddings of size {target.config.hidden_size}"
        )
    if own and config.vocab_size < target.config.vocab_size:
        raise WeightMismatch(
            f"{folder}: {_EMBEDDING} has {config.vocab_size} rows, the target's {target.config.vocab_size}; a head of "
            "the vocabulary before it grew must use the target's"
        )
    with meta_init():
        embedding = nn.Embedding(config.vocab_size, config.hidden_size) if own else target.model.embed_tokens
        head = kind(config, embedding, own_embedding=own)
    whole = config.draft_vocab_size == config.vocab_size and "d2t" not in checkpoint
    head.shares_output = config.draft_vocab_size == target.config.vocab_size and _OUTPUT not in checkpoint
    given = ("d2t",) * whole + (_OUTPUT,) * head.shares_output
    return UnloadedNetwork(head, checkpoint, frozenset(given), spare=frozenset(("t2d",)))


def load_head(prepared: UnloadedNetwork[Head], target: CausalLM, *, dtype: torch.dtype, device: torch.device) -> Head:
    """Load the weights of a head that a ``prepare_*`` function returned for ``target``, and check its vocabulary map.

    Raises:
        WeightMismatch: A tensor or the map does not fit, or the head shares the target's lm_head, which is split.
    """
    head = prepared.fill(dtype=dtype, device=device, finite=True)
    if isinstance(head, Eagle3Head):
        if "d2t" in prepared.given:
            head.d2t = torch.zeros(head.config.draft_vocab_size, dtype=torch.int64, device=device)
        if head.shares_output:
            if target.lm_head.shard is not None:
                raise WeightMismatch(f"{prepared.checkpoint.folder}: {_OUTPUT} is missing, and the target's is split")
            stored = target.lm_head.stored is not None
            head.lm_head = target.lm_head if stored else Linear.of(target.lm_head.weight.to(device, dtype))
    _check_map(head, prepared.checkpoint)
    return head


def prepare_eagle(folder: Path, target: CausalLM) -> UnloadedNetwork[EagleHead]:
    """Return the unloaded EAGLE-1 or EAGLE-2 head of ``folder`` for ``target``."""
    config = eagle_config(read_config(folder), target.config)
    checkpoint = open_checkpoint(folder, _eagle_name)
    if config.fc_bias is None:
        config = replace(config, fc_bias="fc.bias" in checkpoint)
    with meta_init():
        head = EagleHead(
            config, target, own_embedding=_EMBEDDING in checkpoint, own_lm_head="lm_head.weight" in checkpoint
        )
    return UnloadedNetwork(head, checkpoint)


def prepare_medusa(folder: Path, target: CausalLM) -> UnloadedNetwork[MedusaHeads]:
    """Return the unloaded Medusa heads of ``folder`` for ``target``."""
    config = medusa_config(read_config(folder), target.config)
    checkpoint = open_checkpoint(folder, lambda name: _medusa_name(name, config.num_layers))
    with meta_init():
        heads = MedusaHeads(config, bias="blocks.0.layers.0.bias" in checkpoint)
    return UnloadedNetwork(heads, checkpoint)


def _eagle3_name(name: str) -> str:
    """Return SafeAILab's name of an EAGLE-3 tensor.

    SafeAILab's ``midlayer.*`` is ``layers.0.*`` in speculators and ``model.layers.0.*`` in NeMo. TensorRT-LLM numbers
    its midlayers, and the speculators class uses a plural for the norms before ``fc``.
    """
    name = re.sub(r"^fc_norms\.", "fc_norm.", name.removeprefix("model."))
    name = re.sub(r"^midlayer\.(?=\d+\.)", "layers.", name)
    return re.sub(r"^layers\.0\.", "midlayer.", name)


def _eagle_name(name: str) -> str:
    """Return the network's name of an EAGLE-1 tensor, which is SafeAILab's.

    vLLM nests the names in ``model.``; speculators uses other names for the parts.
    """
    name = name.removeprefix("model.")
    return re.sub(r"^transformer\.", "layers.0.", re.sub(r"^fusion_fc\.", "fc.", name))


def _medusa_name(name: str, layers: int) -> str:
    """Return vLLM's name of a Medusa tensor.

    In FasterDecoding's checkpoints, head h is ``layers`` blocks followed by a matrix: ``h.0.linear.weight``,
    ``h.1.weight``.
    """
    name = re.sub(r"^medusa_heads?\.", "", name)
    name = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)
    return re.sub(rf"^(\d+)\.{layers}\.weight$", r"lm_heads.\1.weight", name)


def _check_map(head: AnyHead, checkpoint: Checkpoint) -> None:
    """Raise WeightMismatch unless the draft's tokens are tokens of the target, and those of its t2d if it has one."""
    folder, ids, size = checkpoint.folder, head.target_ids, head.config.vocab_size
    if ids is None:
        return
    if isinstance(head, Eagle3Head) and head.config.draft_vocab_size == size and head.d2t.any():
        raise WeightMismatch(f"{folder}: d2t moves tokens, but the draft's vocabulary is the target's; it must be 0")
    if not ((ids >= 0) & (ids < size)).all():
        name = "token_map" if isinstance(head, MedusaHeads) else "d2t"
        raise WeightMismatch(f"{folder}: {name} maps outside the target's vocabulary of {size}")
    if "t2d" not in checkpoint:
        return
    known_V = checkpoint.read("t2d").bool().flatten()
    if known_V.shape != (size,):
        raise WeightMismatch(f"{folder}: t2d has {len(known_V)} entries, the target's vocabulary {size}")
    mapped_V = torch.zeros_like(known_V)
    mapped_V[ids.cpu()] = True
    if (wrong := (mapped_V != known_V).nonzero()).numel():
        raise WeightMismatch(f"{folder}: t2d and d2t disagree on target token {int(wrong[0])}")


# Loading of P-EAGLE heads: the tensors of an EAGLE-3 head, and ``mask_hidden``.
#
# speculators stores ``mask_hidden`` as [1, 1, A]; vLLM flattens it (vllm-project/vllm,
# vllm/model_executor/models/llama_eagle3.py), so other exporters may store it as [1, A] or [A].

_MASK = "mask_hidden"


def prepare_peagle(folder: Path, target: CausalLM) -> UnloadedNetwork[PEagleHead]:
    """Return the unloaded P-EAGLE head of ``folder`` for ``target``. Raise ModelError if it does not fit."""
    prepared = _prepared(PEagleHead, peagle_config(read_config(folder), target.config), folder, target)
    if _MASK in prepared.checkpoint:
        width = prepared.network.mask_hidden.numel()
        shape = prepared.checkpoint.tensors[_MASK].shape
        if shape in ((width,), (1, width)):
            prepared.network.mask_hidden = nn.Parameter(prepared.network.mask_hidden.view(shape))
    return prepared


# Loading of DFlash heads, in z-lab's layout (z-lab/dflash, dflash/model.py) and in that of speculators.
#
# z-lab's heads share embeddings and output matrix with the target. speculators writes copies of them into the
# checkpoint, the output matrix with the rows of the draft's vocabulary only; ``d2t`` and ``t2d`` then map it
# (vllm-project/speculators at c05b95b3: src/speculators/models/dflash/core.py for the tensors that are saved, and
# ``DraftVocabMixin`` of src/speculators/model.py for those of the vocabulary). As in vLLM (vllm-project/vllm,
# vllm/model_executor/models/qwen3_dflash.py), a head without a copy reads the target's.


def prepare_dflash(folder: Path, target: CausalLM) -> UnloadedNetwork[DFlashHead]:
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
