"""Registry of the sections in the ConfigMap ``<name>-state``. Pure.

| section | version | owner | content | bound (KiB) |
|---|---|---|---|---|
| `meta` | 1 | state store | uid, format, current draft hash, order of parked drafts, what did not fit | 2 |
| `plan` | 1 | planning | plan, rows, swept_at, pin, steering | 24 |
| `estimates` | 1 | planning | estimates that do not depend on the draft | 24 |
| `estimates.<draft hash>` | 1 | planning | acceptance, requests, drafted step times; rows if parked | 32 each |
| `merging` | 1 | merging | merged drafts by task, credit of each draft; absent where no task merges | 24 |
| `scaling` | 1 | scaling | scaling, forecast, startup_seconds | 2 |
| `pods` | 1 | health | pods, recycled_at, recycling | 32 |
| `history` | 1 | decision | history, following, saved_device_seconds | 24 |
| `models` | 1 | decision | commits of models whose URI names none | 4 |
| `drift` | 1 | decision | baselines and drift of the draft by task, decode time a day | 12 |
| `template` | 1 | manifests | applied pod template, hash of its spec, image | 20 |
| `applied` | 1 | kube | digests of the applied children | 8 |

To add a section, add one entry to SECTIONS and a row here. Its fields are fields of LearnedState; reading and writing
go by the entries. A new field of a section needs a default and no new version. Raise the version only if an older
operator would misread the section; an older operator then ignores it. Sections that this operator does not know are
written back unchanged, so that an upgrade after a downgrade finds them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

KIB = 1024
MAX_STATE_BYTES = 256 * KIB
"""Bound of all known sections together; a quarter of what the API server accepts."""
MAX_UNKNOWN_BYTES = 256 * KIB
"""Bound of the preserved sections of a newer operator."""
MAX_TEMPLATE_BYTES = 20 * KIB
MAX_PARKED_DRAFTS = 4
"""Drafts whose estimates are parked: those of a canary, a rollback and two experiments."""

META = "meta"
ESTIMATES = "estimates"
TEMPLATE = "template"
APPLIED = "applied"
LEGACY_KEYS = frozenset(("memory.json", "template.json", "applied.json"))
"""Keys of the format before sections; they are read once and replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One versioned section of the state."""

    name: str
    version: int
    owner: str
    """Package whose fields these are."""
    content: str
    bound: int
    """Bytes of the section in the worst case that is expected: 8 tasks, 64 sequences, 2 contexts. Only the sum of all
    sections is enforced (MAX_STATE_BYTES)."""
    fields: tuple[str, ...] = ()
    """Fields of LearnedState. Empty where another module makes the content."""
    is_per_draft: bool = False
    is_optional: bool = False
    """Whether the section is left out while all of its fields are empty."""


SECTIONS = (
    Section(name=META, version=1, owner="state", content="identity and order of drafts", bound=2 * KIB),
    Section(
        name="plan",
        version=1,
        owner="planning",
        content="plan and state of its rows",
        bound=24 * KIB,
        fields=("plan", "rows", "swept_at", "pin", "steering"),
    ),
    Section(
        name=ESTIMATES,
        version=1,
        owner="planning",
        content="estimates that do not depend on the draft",
        bound=24 * KIB,
        fields=("costs", "prefill", "wander", "traffic", "load"),
    ),
    Section(
        name=f"{ESTIMATES}.",
        version=1,
        owner="planning",
        content="estimates of one draft",
        bound=32 * KIB,
        is_per_draft=True,
    ),
    Section(
        name="merging",
        version=1,
        owner="merging",
        content="merged drafts by task, and their credit",
        bound=24 * KIB,
        fields=("merges", "credit"),
        is_optional=True,
    ),
    Section(
        name="scaling",
        version=1,
        owner="scaling",
        content="recent demand and its forecast",
        bound=2 * KIB,
        fields=("scaling", "forecast", "startup_seconds"),
    ),
    Section(
        name="pods",
        version=1,
        owner="health",
        content="figures of each pod",
        bound=32 * KIB,
        fields=("pods", "recycled_at", "recycling"),
    ),
    Section(
        name="history",
        version=1,
        owner="decision",
        content="latest decisions and gains being measured",
        bound=24 * KIB,
        fields=("history", "following", "saved_device_seconds"),
    ),
    Section(
        name="models",
        version=1,
        owner="decision",
        content="commits of models whose URI names none",
        bound=4 * KIB,
        fields=("revisions",),
    ),
    Section(
        name="drift",
        version=1,
        owner="decision",
        content="baselines and drift of the draft by task",
        bound=12 * KIB,
        fields=("drift",),
    ),
    Section(name=TEMPLATE, version=1, owner="manifests", content="applied pod template", bound=MAX_TEMPLATE_BYTES),
    Section(name=APPLIED, version=1, owner="kube", content="digests of the applied children", bound=8 * KIB),
)

_BY_NAME = {section.name: section for section in SECTIONS}
_PER_DRAFT = tuple(section for section in SECTIONS if section.is_per_draft)
_PLAIN_HASH = re.compile(r"[0-9A-Za-z_-]{1,64}")


def section_of(key: str) -> Section | None:
    """Return the section that is stored under ``key``, or None if this operator does not know it."""
    known = _BY_NAME.get(key)
    return known or next((section for section in _PER_DRAFT if key.startswith(section.name)), None)


def version_of(key: str) -> int:
    """Return the version in which the section ``key`` is written."""
    section = section_of(key)
    assert section is not None, key
    return section.version


def fields_of(key: str) -> tuple[str, ...]:
    """Return the fields of LearnedState that the section ``key`` may set."""
    section = section_of(key)
    return (TEMPLATE,) if key == TEMPLATE else section.fields if section else ()


def draft_key(draft: str) -> str:
    """Return the key of one draft's estimates. A hash with characters that a key cannot have is hashed again."""
    plain = draft if _PLAIN_HASH.fullmatch(draft) else hashlib.blake2b(draft.encode(), digest_size=12).hexdigest()
    return f"{ESTIMATES}.{plain}"


def unknown_sections(data: Mapping[str, str]) -> dict[str, str]:
    """Return the sections of a newer operator, which are written back unchanged."""
    return {key: text for key, text in data.items() if section_of(key) is None and key not in LEGACY_KEYS}
