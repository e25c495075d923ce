"""Speed of ``generate`` in transformers, as a reference for ``bench``.

The same prompts run greedily, one at a time. transformers is a development dependency.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def is_installed() -> bool:
    """Return whether transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


def transformers_tokens_per_second(
    folder: Path, dtype: str, prompts: Sequence[Sequence[int]], max_tokens: int
) -> float:
    """Return the tokens per second after the first token of each prompt.

    Raises:
        ValueError: transformers is not installed.
    """
    try:
        from transformers import LlamaForCausalLM
    except ImportError:
        raise ValueError("--transformers needs the package transformers; pip install transformers") from None
    model = LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    _seconds(model, prompts[0], 4)
    seconds = tokens = 0.0
    for prompt in prompts:
        first, _ = _seconds(model, prompt, 1)
        all_of_them, count = _seconds(model, prompt, max_tokens)
        seconds, tokens = seconds + all_of_them - first, tokens + count - 1
    return tokens / seconds


def _seconds(model: Any, prompt: Sequence[int], max_tokens: int) -> tuple[float, int]:
    """Return the duration in seconds and the number of generated tokens."""
    ids = torch.tensor([list(prompt)])
    began = time.monotonic()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
    return time.monotonic() - began, out.shape[1] - len(prompt)
