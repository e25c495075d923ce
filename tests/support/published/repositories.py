"""Repositories that the README, the documentation and the examples name, with their files as they are published.

A small random model is in place of the published weights. The hub itself is not asked by any test: the lists come from
public material, looked up on the date of each entry; what that material does not say is not ``confirmed``, and so does
docs/reference/compatibility.md.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support import small_model
from support.published.hub import COMMIT, Repository


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


TOKEN = "hf_of-an-account-that-accepted"
"""Token that gated repositories ask for."""


def repository(name: str, config: dict[str, Any] | None = None) -> Repository:
    """Return the repository ``name`` of LAYOUTS. Pickled ones are heads, the others targets.

    Both have ``config`` in config.json. The files that specdecode reads are there; others say that they are not.
    """
    layout = LAYOUTS[name]
    weights = [file for file in layout.files if file.endswith((".safetensors", ".bin"))]
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary)
        if weights[0].endswith(".bin"):
            small_model.write_draft(model, config=config or {})
        else:
            small_model.write_target(model, config=config or {})
        state = load_file(model / "model.safetensors")
        index = {tensor: weights[i % len(weights)] for i, tensor in enumerate(state)}
        files = dict.fromkeys(layout.files, b"not needed")
        files["generation_config.json"] = json.dumps({"eos_token_id": [small_model.END_ID]}).encode()
        files["special_tokens_map.json"] = b"{}"
        files |= {path.name: path.read_bytes() for path in model.iterdir()}
        files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": index}).encode()
        for file in weights:
            part = {tensor: value for tensor, value in state.items() if index[tensor] == file}
            save_file(part, model / file) if file.endswith(".safetensors") else torch.save(part, model / file)
            files[file] = (model / file).read_bytes()
    return Repository(
        {file: files[file] for file in layout.files},
        name=name,
        token=TOKEN if layout.gated else None,
        head=layout.revision or COMMIT,
    )
