"""Repositories in a published layout, with a small random model in place of the published weights."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support import small_model
from support.published.hub import COMMIT, Repository
from support.published.layouts import LAYOUTS

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
