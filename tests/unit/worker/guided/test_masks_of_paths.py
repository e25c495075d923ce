"""Masks behind tree paths equal those of a fresh guide that reads the same tokens, with a real vocabulary.

A rollback of llguidance 1.9.1 breaks this: a later mask allows a quote and a comma where a colon must follow.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdecode_worker.commands.common.flags import EMBEDDED_TARGET
from specdecode_worker.guided.grammar_compiler import GrammarCompiler
from specdecode_worker.guided.grammars import json_grammar
from specdecode_worker.models.checkpoints.model_store import default_cache_dir, resolve
from specdecode_worker.server.text.tokenizer import Tokenizer

pytestmark = pytest.mark.embedded

SHAPES: Any = {
    "type": "object",
    "properties": {
        "dimensions": {"type": "object", "properties": {"base": {"type": "number"}, "height": {"type": "number"}}},
        "shape": {"type": "string"},
    },
    "required": ["shape", "dimensions"],
}
TEXTS = (
    '{"dimensions":{"properties":{"description":{"height":{"type":{"a": [1, 2, true]}}}}}, "shape":"x, y"}',
    '{"dimensions": {"height": 2, "radius": 3.5}, "shape": "circle"}',
)


@pytest.mark.parametrize("text", TEXTS)
def test_masks_behind_paths_equal_those_of_a_fresh_guide(text: str) -> None:
    tokenizer = Tokenizer.from_folder(resolve(EMBEDDED_TARGET, default_cache_dir()))
    compiler = GrammarCompiler(lambda: tokenizer.json, tokenizer.vocab_size, (2,))
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
        after = guide.mask()
        assert before is not None
        assert after is not None
        assert np.array_equal(before, after)
        guide.advance([token])
        assert not guide.error
