"""Bounded reading of config.json and of the files beside it that say how a text begins and ends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from specdecode_worker.models.errors import ConfigMismatch

# Strict reader of config.json: every field has a type and bounds.
#
# An invalid value is refused with a message that names the field.

Value = TypeVar("Value")
LARGEST = 2**24
"""Upper bound of sizes in config.json. Published networks stay below it; a larger value is an error or an attack."""


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Read config.json of a model folder. Raise ConfigMismatch if it is absent or not a JSON object."""
    path = folder / name
    try:
        config = _parsed(path)
    except FileNotFoundError:
        raise ConfigMismatch(f"{path} does not exist; name a folder that holds {name} and *.safetensors") from None
    if not isinstance(config, dict):
        raise ConfigMismatch(f"{path} holds no JSON object")
    return config


def _parsed(path: Path) -> Any:
    """Return what a JSON file holds. Raise FileNotFoundError, or ConfigMismatch if it cannot be read otherwise."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigMismatch(f"{path} is no JSON: {error}") from None


@dataclass(frozen=True, slots=True)
class Fields:
    """JSON object within config.json. A null value counts as absent.

    Every method that reads a field raises ConfigMismatch with the field's name if the value is invalid.
    """

    raw: Mapping[str, Any]
    where: str = "config.json"

    def has(self, name: str) -> bool:
        """Return whether the field is present and not null."""
        return self.raw.get(name) is not None

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = LARGEST) -> int:
        """Return an integer between ``least`` and ``most``."""
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            expected = "a positive integer" if (least, most) == (1, LARGEST) else f"an integer in {least}..{most}"
            raise self._wrong(name, expected, value)
        return value

    def number(self, name: str, default: float | None = None, *, least: float = 0) -> float:
        """Return a finite number above 0 and not below ``least``."""
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not (0 < value < 2**63 and value >= least):
            raise self._wrong(name, f"a number from {least} on" if least else "a number above 0", value)
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean."""
        return self._typed(name, default, bool, "true or false")

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string."""
        return self._typed(name, default, str, "a string")

    def part(self, name: str) -> Fields:
        """Return a nested object; an empty one if absent."""
        return Fields(self._typed(name, {}, dict, "an object"), f"{self.where}: {name}")

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of strings; an empty one if absent."""
        value = self._get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, "a list of strings", value)
        return tuple(value)

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of integers that are at least 0.

        A single integer is read as a list of length one; an absent field as an empty list.
        """
        value = self._get(name, [])
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < LARGEST for item in items):
            raise self._wrong(name, "integers from 0 on", value)
        return tuple(items)

    def refuse(self, name: str, *plain: object) -> None:
        """Raise ConfigMismatch if the field requests an unsupported feature.

        Absent, null, false and the values in ``plain`` are accepted.
        """
        value = self.raw.get(name)
        if value is not None and value is not False and value not in plain:
            raise ConfigMismatch(f"{self.where}: {name} {_short(value)} is not supported")

    def _typed(self, name: str, default: object, kind: type[Value], expected: str) -> Value:
        value = self._get(name, default)
        if not isinstance(value, kind):
            raise self._wrong(name, expected, value)
        return value

    def _get(self, name: str, default: object) -> object:
        value = self.raw.get(name)
        return default if value is None else value

    def _wrong(self, name: str, expected: str, value: object) -> ConfigMismatch:
        return ConfigMismatch(f"{self.where}: {name} must be {expected}, got {_short(value)}")


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**18 else "a huge number"
    return text if len(text) <= 80 else text[:77] + "..."


# Fields about text in a model folder, which are spread over several files: end tokens, special tokens, sampling.
#
# Published folders disagree with themselves. config.json of a chat model often names the end of a document alone, and
# generation_config.json or the tokenizer the end of a turn.

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
TEMPLATE_FOLDER = "additional_chat_templates"
"""Folder, within that of a model, of chat templates for special purposes."""
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def end_tokens(folder: Path, configured: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ids of the tokens that end an answer, in ascending order.

    They are those of config.json (``configured``) and generation_config.json, and the tokenizer's ``eos_token``.

    Raises:
        ConfigMismatch: A file cannot be parsed, or an id is no integer.
    """
    generation = Fields(read_optional(folder / "generation_config.json"), "generation_config.json")
    ids = {*configured, *generation.integers("eos_token_id")}
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


def listed_tokens(folder: Path) -> dict[int, Mapping[str, Any]]:
    """Return the added tokens that tokenizer_config.json lists, by id in ascending order. Raises ConfigMismatch."""
    listed = read_optional(folder / "tokenizer_config.json").get("added_tokens_decoder")
    found = listed.items() if isinstance(listed, Mapping) else ()
    tokens = {
        int(i): token for i, token in found if i.isdecimal() and isinstance(token, Mapping) and _token_text(token)
    }
    return dict(sorted(tokens.items()))


def read_optional(path: Path) -> Mapping[str, Any]:
    """Read a JSON object; empty if the file is missing or holds another type. Raises ConfigMismatch."""
    try:
        parsed = _parsed(path)
    except FileNotFoundError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _token_text(token: Any) -> str:
    """Return the text of a special token: the token itself, or the key ``content`` if it is an object; else ""."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _token_id(folder: Path, text: str) -> int | None:
    """Return the id of a token of tokenizer.json; None if it has no such token."""
    tokenizer = read_optional(folder / "tokenizer.json")
    added: dict[str, Any] = {token["content"]: index for index, token in listed_tokens(folder).items()}
    listed, model = (tokenizer.get(name) for name in ("added_tokens", "model"))
    more = (token for token in (listed if isinstance(listed, list) else ()) if isinstance(token, Mapping))
    added |= {_token_text(token): token.get("id") for token in more}
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    token = added.get(text, vocabulary.get(text) if isinstance(vocabulary, Mapping) else None)
    return token if isinstance(token, int) else None
