"""Texts of sections from their content, and back; independent of the fields of LearnedState. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from specdecode_operator.state.cells import DraftEstimates
from specdecode_operator.state.compact import decode, encode
from specdecode_operator.state.sections import META, TEMPLATE, draft_key, section_of, version_of
from specdecode_operator.state.step_moments import restore_cell, shorten_cell

Json = dict[str, Any]


def size_of(data: Mapping[str, str]) -> int:
    """Return the bytes of all texts."""
    return sum(len(text.encode()) for text in data.values())


def draft_text(estimates: DraftEstimates) -> str:
    """Return the section of one draft."""
    content = json.loads(estimates.model_dump_json(by_alias=True))
    content["costs"] = [shorten_cell(cell) for cell in content["costs"]]
    return encode(version_of(draft_key(estimates.draft)), content)


@lru_cache(maxsize=64)
def parked_text(estimates: DraftEstimates) -> str:
    """Return the section of a parked draft, cached, because parked estimates seldom change."""
    return draft_text(estimates)


def decode_sections(data: Mapping[str, str]) -> tuple[dict[str, Json], list[str]]:
    """Return the content of the known sections that can be decoded, and the reasons for the others."""
    contents: dict[str, Json] = {}
    problems: list[str] = []
    for key, text in data.items():
        section = section_of(key)
        if section is None or (not section.fields and not section.is_per_draft and key not in (META, TEMPLATE)):
            continue
        try:
            version, content = decode(text)
            if version > section.version:
                raise ValueError(f"version {version} is of a newer operator; this one reads {section.version}")
            contents[key] = content
        except (ValueError, RecursionError) as error:
            problems.append(f"section {key}: {error}")
    return contents, problems


def restored(content: Json) -> Json:
    """Return the content of a section with complete step times."""
    return {**content, "costs": [restore_cell(cell) for cell in content["costs"]]} if "costs" in content else content
