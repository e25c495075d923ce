"""File lists of the repositories that the README, the documentation and the examples name, as they are published.

The hub itself is not asked by any test. The lists come from public material, looked up on the date of each entry; what
that material does not say is not ``confirmed``, and so does docs/reference/compatibility.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """Files of one repository."""

    files: tuple[str, ...]
    source: str
    """Public material that names the files, and the date when it was looked up."""
    confirmed: bool
    """False if the material names files of a sibling, or some of the files alone."""
    gated: bool = False
    revision: str = ""
    """Commit that the documentation pins; empty without."""


def _llama(shards: int) -> tuple[str, ...]:
    """Return the list that Meta's Llama 3 repositories share, which differ in their number of shards."""
    return (
        *("LICENSE", "README.md", "USE_POLICY.md", "config.json", "generation_config.json"),
        *(f"model-{i:05}-of-{shards:05}.safetensors" for i in range(1, shards + 1)),
        *("model.safetensors.index.json", "original/consolidated.00.pth", "original/params.json"),
        *("original/tokenizer.model", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"),
    )


_HEAD = ("README.md", "config.json", "pytorch_model.bin")
_LOOKED_UP = "looked up 2026-11-27"

LAYOUTS: Mapping[str, Layout] = {
    "meta-llama/Llama-3.1-8B-Instruct": Layout(
        _llama(4),
        "listing of Meta-Llama-3-8B-Instruct in ggml-org/llama.cpp pull request 6745 (2024-05-02); the four shards of "
        f"3.1 are named in public loaders; {_LOOKED_UP}",
        confirmed=False,
        gated=True,
        revision="0e9e39f249a16976918f6564b8830bc894c89659",
    ),
    "meta-llama/Llama-3.3-70B-Instruct": Layout(
        _llama(30),
        f"shards of Meta-Llama-3-70B-Instruct in ggml-org/llama.cpp issue 6747 (2024-04-21); {_LOOKED_UP}",
        confirmed=False,
        gated=True,
        revision="6f6073b423013f6a7d4d9f39144961bfbfbc386b",
    ),
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": Layout(
        _HEAD,
        "public scripts fetch config.json and pytorch_model.bin from the repository's branch main, for conversion by "
        f"ggml-org/llama.cpp (pull request 18039), and name no other file of weights; {_LOOKED_UP}",
        confirmed=True,
    ),
    "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B": Layout(
        _HEAD,
        f"as that of 8B: a public script fetches config.json and pytorch_model.bin from branch main; {_LOOKED_UP}",
        confirmed=True,
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8": Layout(
        (
            *("README.md", "config.json", "generation_config.json", "model-00001-of-00002.safetensors"),
            *("model-00002-of-00002.safetensors", "model.safetensors.index.json", "recipe.yaml"),
            *("special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"),
        ),
        "named in vllm-project/recipes pull request 868 (2026-08-27) and in the fusion tests of vllm-project/vllm; the "
        "shards follow from its size; looked up 2026-11-30",
        confirmed=False,
    ),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": Layout(
        (
            *("LICENSE", "README.md", "USE_POLICY.md", "chat_template.jinja", "config.json", "generation_config.json"),
            *(f"model-{i:05}-of-00050.safetensors" for i in range(1, 51)),
            *("model.safetensors.index.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
        ),
        "a public record of the hub's listing of 2026-09-26 names the 50 shards, all files here but the index, and 64 "
        "files of 217 GB in all; looked up 2026-11-30",
        confirmed=False,
        gated=True,
    ),
    "lmsys/SGLang-EAGLE3-Llama-4-Scout-17B-16E-Instruct-SpecForge": Layout(
        ("README.md", "config.json", "model.safetensors"),
        "listed in the model tables of sgl-project/SpecForge, whose training script saves config.json and safetensors "
        "without embeddings; looked up 2026-11-30",
        confirmed=False,
    ),
}
