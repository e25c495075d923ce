"""Perplexity of the embedded model with keys and values as they are, and in fp8.

    python benchmarks/kv_cache_perplexity.py [--texts 8] [--length 512]

The texts are pieces of this project's pages. Each is one pass over the paged cache, as a chunk of a prompt is, so that
every token reads the stored keys of all before it. Weights and activations are fp32: only the cache differs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from specdecode_kernels.rope_cache.reference import UNSCALED, Scales
from specdecode_worker.commands.flags import EMBEDDED_TARGET
from specdecode_worker.core.device_state import PackedBatch, PagedCache
from specdecode_worker.core.kv_cache import BLOCK_SIZE
from specdecode_worker.drafts.registry import paged_cache
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.fetch import default_cache_dir, resolve
from specdecode_worker.models.weights import load_causal_lm

CPU = torch.device("cpu")
PAGES = Path(__file__).resolve().parents[1] / "docs"


def pieces(tokenizer: Tokenizer, texts: int, length: int) -> Tensor:
    """Return so many pieces of the pages, [texts, length]."""
    pages = "\n\n".join(path.read_text() for path in sorted(PAGES.rglob("*.md")) if path.parent.name != "reference")
    tokens = torch.tensor(tokenizer.encode(pages, add_special_tokens=False).ids)
    return tokens.unfold(0, length, max(len(tokens) // texts - length, 1))[:texts]


def packed(tokens_T: Tensor) -> PackedBatch:
    """Return a pass over one text, whose blocks follow the padding block."""
    count = len(tokens_T)
    blocks = tuple(range(1, -(-count // BLOCK_SIZE) + 1))
    return PackedBatch(
        tokens_T=tokens_T,
        positions_T=torch.arange(count),
        slots_T=torch.arange(count) + BLOCK_SIZE,
        prefix_len_B=torch.zeros(1, dtype=torch.int64),
        ancestors_T=torch.zeros(count, dtype=torch.int64),
        block_table_BM=torch.tensor([blocks]),
        blocks=(blocks,),
        query_counts=(count,),
        key_bounds=(count,),
        key_starts=(0,),
        dense=False,
    )


@torch.inference_mode()
def surprise(model: CausalLM, cache: PagedCache, tokens_T: Tensor) -> Tensor:
    """Return the negative log-probability of each token but the first."""
    batch = packed(tokens_T)
    hidden_TE = model(batch.tokens_T, batch.positions_T, cache.attend(batch)).hidden_TE
    return F.cross_entropy(model.logits(hidden_TE[:-1]), tokens_T[1:], reduction="none")


@torch.inference_mode()
def fitted(model: CausalLM, tokens_T: Tensor) -> tuple[Scales, ...]:
    """Return the scales of each layer under which the largest key and value of one text is the largest number."""
    config = model.config
    cache = paged_cache(config, config.num_hidden_layers, len(tokens_T) // BLOCK_SIZE + 2, torch.float32, CPU)
    surprise(model, cache, tokens_T)
    return tuple(Scales(*(layer.abs().flatten(1).amax(1) / 448).tolist()) for layer in cache.data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    arguments = parser.parse_args()
    folder = resolve(EMBEDDED_TARGET, default_cache_dir())
    model = load_causal_lm(folder, dtype=torch.float32, device=CPU)
    first, *texts = pieces(Tokenizer.from_file(str(folder / "tokenizer.json")), arguments.texts + 1, arguments.length)
    layers = model.config.num_hidden_layers
    caches: dict[str, Sequence[Scales]] = {
        "as activations": (),
        "fp8, scales of 1": (UNSCALED,) * layers,
        "fp8, scales of one other text": fitted(model, first),
    }
    plain = 0.0
    for name, scales in caches.items():
        cache = paged_cache(model.config, layers, arguments.length // BLOCK_SIZE + 2, torch.float32, CPU, scales)
        mean = torch.cat([surprise(model, cache, text) for text in texts]).double().mean().item()
        plain = plain or mean
        print(f"{name:30} perplexity {math.exp(mean):8.4f}  {math.expm1(mean - plain):+.3%}", flush=True)


if __name__ == "__main__":
    main()
