"""Fixtures with a minimal tokenizer in Hugging Face's folder layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdecode_worker.server import tools as text_tokenizer
from support.small_model import write_tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> text_tokenizer.Tokenizer:
    return text_tokenizer.Tokenizer.from_folder(model_folder)
