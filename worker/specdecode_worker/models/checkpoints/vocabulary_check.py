"""Check that a draft model and its target tokenize every text identically.

The check compares the whole vocabulary, and the tokens of a probe text, in which differences of normalizers, splits and
merges appear. The matrices may have different sizes, since published models pad them differently; `fit_vocabulary`
makes them equal.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from specdecode_worker.models.errors import VocabularyMismatch
from specdecode_worker.models.networks.llama import Llama

PROBE = """The quick brown fox -- isn't it? -- jumps over 13 lazy dogs, 1,024.50 times; e.g. "why"?
In the middle of the internationalisation, they were thinking about nothing other than what the others had.

def f(x: int) -> list[str]:\n\treturn [f"{x:>04d}"] * 3   # trailing   spaces   \r\n
SELECT name, COUNT(*) FROM t WHERE id <> 7 GROUP BY 1; <div class='a'>&amp;</div> \\frac{a}{b} https://x.org/?q=1&r=2
Žluťoučký kůň, ﬁne e\u0301 vs é, größer, ИЮНЬ, 你好世界, こんにちは, 한국어, مرحبا, नमस्ते, 🤖👩\u200d💻 ½ ①
\u00a0\u2003<s> </s> <unk> <|endoftext|> <|im_start|>user <|eot_id|> [INST] ünïcödé AAAAAAAAAA 0000000000 xX_yY-zZ"""
"""Probe text: words, numbers, code, markup, scripts, composed and decomposed letters, spaces, special tokens."""


def check_vocabulary(target_folder: Path, draft_folder: Path) -> None:
    """Raise VocabularyMismatch, which names the first token that differs between the two tokenizers."""
    target, draft = _tokenizer(target_folder), _tokenizer(draft_folder)
    names = f"{draft_folder} cannot draft for {target_folder}"
    ours, theirs = (_by_id(tokenizer) for tokenizer in (target, draft))
    for token_id in sorted(ours.keys() | theirs.keys()):
        if ours.get(token_id) != theirs.get(token_id):
            raise VocabularyMismatch(
                f"{names}: token {token_id} is {_shown(theirs.get(token_id))} to the draft and "
                f"{_shown(ours.get(token_id))} to the target"
            )
    target_encoding, draft_encoding = (
        tokenizer.encode(PROBE, add_special_tokens=False) for tokenizer in (target, draft)
    )
    for place, pair in enumerate(zip([*target_encoding.tokens, None], [*draft_encoding.tokens, None], strict=False)):
        if pair[0] != pair[1]:
            raise VocabularyMismatch(
                f"{names}: token {place} of the probe text is {_shown(pair[1])} to the draft and {_shown(pair[0])} to "
                "the target"
            )


@torch.no_grad()
def fit_vocabulary(draft: Llama, size: int) -> None:
    """Resize the draft's embedding and lm_head to ``size`` rows, in place.

    Padding rows at the end are cut, or added as zeros. Target and draft can then exchange any token id; the added ids
    belong to no token.
    """
    if draft.config.vocab_size == size:
        return
    embedding, output = draft.model.embed_tokens, draft.lm_head
    tied = output.weight is embedding.weight
    embedding.weight = _resized(embedding.weight, size)
    output.weight = embedding.weight if tied else _resized(output.weight, size)
    embedding.num_embeddings = output.out_features = size
    draft.config = replace(draft.config, vocab_size=size)


def _resized(weight: Tensor, size: int) -> nn.Parameter:
    resized = weight.new_zeros(size, weight.shape[1])
    common_rows = min(size, len(weight))
    resized[:common_rows] = weight[:common_rows]
    return nn.Parameter(resized, requires_grad=False)


def _tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise VocabularyMismatch(f"{path} does not exist; without it nothing says that target and draft share tokens")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower type
        raise VocabularyMismatch(f"{path} cannot be read: {error}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _by_id(tokenizer: Tokenizer) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}


def _shown(token: str | None) -> str:
    return "nothing" if token is None else repr(token)
