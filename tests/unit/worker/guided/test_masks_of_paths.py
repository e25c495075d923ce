"""Masks behind tree paths equal those of a fresh guide that reads the same tokens, with a real vocabulary.

Every token that a mask allows can also be consumed, and looking behind a path leaves the position unchanged.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdecode_worker.commands.flags import EMBEDDED_TARGET
from specdecode_worker.guided.grammars import GrammarCompiler, json_grammar
from specdecode_worker.models.fetch import default_cache_dir, resolve
from specdecode_worker.server.tools import Tokenizer

pytestmark = pytest.mark.embedded

SHAPES: Any = {
    "type": "object",
    "properties": {
        "dimensions": {
            "type": "object",
            "properties": {name: {"type": "number"} for name in ("base", "height", "radius", "side")},
            "additionalProperties": True,
        },
        "shape": {"type": "string"},
    },
    "required": ["shape", "dimensions"],
}
TEXTS = (
    '{"dimensions":{"properties":{"description":{"height":{"type":{"a": [1, 2, true]}}}}}, "shape":"x, y"}',
    '{"dimensions": {"height": 2, "radius": 3.5}, "shape": "circle"}',
)


MOST_PROBES = 200
END = 2


def allowed(mask: Any) -> list[int]:
    """Return the allowed tokens, without the end token, behind which nothing follows."""
    tokens: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return [token for token in tokens if token != END]


@pytest.mark.parametrize("text", TEXTS)
def test_masks_behind_paths_equal_those_of_a_fresh_guide(text: str) -> None:
    tokenizer = Tokenizer.from_folder(resolve(EMBEDDED_TARGET, default_cache_dir()))
    compiler = GrammarCompiler(lambda: tokenizer.json, tokenizer.vocab_size, (END,))
    grammar, tokens = json_grammar(SHAPES), tokenizer.encode(text)
    guide = compiler.guide(grammar)
    for place, token in enumerate(tokens):
        before = guide.mask()
        for end in range(place, min(place + 4, len(tokens)) + 1):
            fresh = compiler.guide(grammar)
            fresh.advance(tokens[:end])
            mask, wanted = guide.mask(tokens[place:end]), fresh.mask()
            assert mask is not None
            assert wanted is not None
            assert np.array_equal(mask, wanted), (place, end, tokenizer.decode(tokens[place:end]))
        assert before is not None
        for other in allowed(before)[:MOST_PROBES]:
            assert guide.mask([other]) is not None, (place, tokenizer.decode([other]))
        after = guide.mask()
        assert after is not None
        assert np.array_equal(before, after)
        guide.advance([token])
        assert not guide.error


WRONG_PATH = (" [", '">', " Inclusion", "atteries")
"""Tokens behind a colon that the text does not continue with. The path ends inside a string."""


def test_rejected_paths_leave_the_position_unchanged() -> None:
    """After llguidance 1.9.1 has left such a path by its rollback, masks behind the next tokens are wrong."""
    tokenizer = Tokenizer.from_folder(resolve(EMBEDDED_TARGET, default_cache_dir()))
    compiler = GrammarCompiler(lambda: tokenizer.json, tokenizer.vocab_size, (END,))
    wrong = [token for piece in WRONG_PATH for token in tokenizer.encode(piece)]
    assert len(wrong) == len(WRONG_PATH), "each piece is one token"
    grammar, tokens = json_grammar({"type": "object"}), tokenizer.encode(TEXTS[0])
    guide = compiler.guide(grammar)
    looked = 0
    for place, token in enumerate(tokens):
        looked += guide.mask(wrong) is not None
        guide.advance([token])
        fresh = compiler.guide(grammar)
        fresh.advance(tokens[: place + 1])
        mask, wanted = guide.mask(), fresh.mask()
        assert mask is not None
        assert wanted is not None
        assert np.array_equal(mask, wanted), tokenizer.decode(tokens[: place + 1])
    assert looked > 1, "the path must be allowed at some places"
