"""Fixtures with a minimal tokenizer in Hugging Face's folder layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdecode_worker.server import tools as text_tokenizer
from support.small_model import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|end|>"}))
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> text_tokenizer.Tokenizer:
    return text_tokenizer.Tokenizer.from_folder(model_folder)
