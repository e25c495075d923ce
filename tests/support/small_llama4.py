"""A Llama 4 of kilobytes, made and saved by transformers: chunks of 16 positions, temperature from position 7 on."""

from __future__ import annotations

import json
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specdecode_worker.models.causal_lm import Attend
from specdecode_worker.models.config import CausalLMConfig
from support.small_model import END_ID, VOCAB_SIZE, byte_tokenizer, write_tokenizer
from support.worker.quantized_folders import Rounding, write_quantized
from support.worker.small_folders import write_head

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "intermediate_size_mlp": 80,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 16,
    "floor_scale": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": [2, 5],
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
QUANTIZED = {"architectures": ["Llama4ForCausalLM"], "intermediate_size": 64, "intermediate_size_mlp": 96}
"""Fields of models with groups of 32 inputs."""
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}


def save_llama4(
    folder: Path, dtype: torch.dtype = torch.float32, *, images: bool = False, seed: int = 1, **changes: Any
) -> Any:
    """Save a random model to ``folder``, and return its text part; with ``images``, a model of text and images."""
    from transformers import Llama4Config, Llama4ForCausalLM, Llama4ForConditionalGeneration, Llama4TextConfig

    fields = SHAPE | changes
    if images:
        model = Llama4ForConditionalGeneration(Llama4Config(text_config=fields, vision_config=VISION))
    else:
        model = Llama4ForCausalLM(Llama4TextConfig(**fields))
    text = model.language_model if images else model
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.uniform_(0.5, 1.5, generator=generator)
        elif parameter.dim() > 1:
            std = 0.5 if "router" in name else 0.08 if "lm_head" in name else 0.16
            parameter.data.normal_(std=std, generator=generator)
        else:
            parameter.data.normal_(std=0.5, generator=generator)
    text.to(dtype)
    model.eval().save_pretrained(folder)
    return text


def write_quantized_llama4(folder: Path, rounding: Rounding, **changes: Any) -> dict[str, Tensor]:
    """Write a random model with quantized matrices, one for each expert, and return its weights in fp32."""
    return write_quantized(
        folder,
        rounding,
        {"quant_method": "compressed-tensors"},
        plain=("router",),
        rename=lambda name: name.replace(".mlp.", ".feed_forward."),
        **SHAPE | QUANTIZED | changes,
    )


@dataclass(frozen=True, slots=True)
class Served:
    """Folder with ``target`` and ``head``, a prompt, and the greedy text of ``tokens`` tokens that must follow it."""

    folder: Path
    prompt: str
    text: str
    tokens: int


def write_served_llama4(folder: Path) -> Served:
    """Write a target with a tokenizer and a random EAGLE-3 head, which every user may read."""
    target, prompt, count = folder / "target", "The quick brown fox jumps over the lazy dog 42", 40
    target.mkdir(parents=True)
    write_tokenizer(target)
    theirs = save_llama4(target, vocab_size=VOCAB_SIZE, num_hidden_layers=4, eos_token_id=END_ID)
    theirs.lm_head.weight.data[len(string.printable.strip()) :] = 0  # all other bytes, which alone are no text
    theirs.save_pretrained(target)
    fields = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    write_head(folder / "head", target=json.loads((target / "config.json").read_text()), **fields)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode(prompt).ids
    with torch.inference_mode():
        for _ in range(count):
            best = theirs(torch.tensor([tokens]), use_cache=False).logits[0, -1].topk(2)
            assert best.values[0] - best.values[1] > 1e-3, "a tie"
            tokens.append(int(best.indices[0]))
    return Served(folder, prompt, tokenizer.decode(tokens[-count:]), count)


def dense_chunks(config: CausalLMConfig) -> Attend:
    """Return causal attention over one text, without a cache, within chunks in the layers whose kind says so."""

    def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        place_T = torch.arange(len(q_THD))
        seen_TT = place_T <= place_T[:, None]
        if config.kind(layer).chunked:
            chunk_T = place_T // config.attention_chunk_size
            seen_TT &= chunk_T == chunk_T[:, None]
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen_TT, enable_gqa=True)
        return out[0].transpose(0, 1)

    return attend
