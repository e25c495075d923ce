"""Fields about text in a model folder, which are spread over several files: end tokens, special tokens, sampling.

Published folders disagree with themselves. config.json of a chat model often names the end of a document alone, and
generation_config.json or the tokenizer the end of a turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdecode_worker.models.configs.config_fields import Fields, read_config
from specdecode_worker.models.errors import ConfigMismatch

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
TEMPLATE_FOLDER = "additional_chat_templates"
"""Folder, within that of a model, of chat templates for special purposes."""
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def end_tokens(folder: Path) -> tuple[int, ...]:
    """Return the ids of the tokens that end an answer, in ascending order.

    They are those of config.json and generation_config.json and the ``eos_token`` of the tokenizer.

    Raises:
        ConfigMismatch: A file cannot be parsed, or an id is no integer.
    """
    generation = Fields(read_optional(folder / "generation_config.json"), "generation_config.json")
    ids = {*Fields(read_config(folder)).integers("eos_token_id"), *generation.integers("eos_token_id")}
    text = special_tokens(folder).get("eos_token")
    known = _token_id(folder, text) if text else None
    return tuple(sorted(ids if known is None else ids | {known}))


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """Return the sampling parameters that generation_config.json names, as vLLM reads them. Raises ConfigMismatch."""
    given = read_optional(folder / "generation_config.json")
    return {name: given[name] for name in _SAMPLING if given.get(name) is not None}


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the texts of the special tokens by name, such as ``bos_token``, as transformers gives them to templates.

    special_tokens_map.json counts where tokenizer_config.json does not list the added tokens, as in older folders.

    Raises:
        ConfigMismatch: A file cannot be parsed.
    """
    config = read_optional(folder / "tokenizer_config.json")
    older = {} if "added_tokens_decoder" in config else read_optional(folder / "special_tokens_map.json")
    more = {**config, **older}.get("extra_special_tokens")
    named = {name: {**config, **older}.get(name) for name in _NAMES} | (more if isinstance(more, dict) else {})
    return {name: text for name, token in named.items() if (text := _token_text(token))}


def read_optional(path: Path) -> Mapping[str, Any]:
    """Read a JSON object; empty if the file is missing or holds another type. Raises ConfigMismatch."""
    try:
        parsed = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigMismatch(f"{path} is no JSON: {error}") from None
    return parsed if isinstance(parsed, dict) else {}


def _token_text(token: Any) -> str:
    """Return the text of a special token: the token itself, or the key ``content`` if it is an object; else ""."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _token_id(folder: Path, text: str) -> int | None:
    """Return the id of a token of tokenizer.json; None if it has no such token."""
    tokenizer = read_optional(folder / "tokenizer.json")
    added = {token.get("content"): token.get("id") for token in tokenizer.get("added_tokens") or ()}
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    token = added.get(text, vocabulary.get(text) if isinstance(vocabulary, Mapping) else None)
    return token if isinstance(token, int) else None
