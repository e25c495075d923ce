"""May a model draft for another? Only if both read every text as the same tokens.

Checked token by token on a probe text, where normalisers, splits and merges show, and over the whole vocabulary. Sizes
of the matrices may differ, since published models pad them differently; ``fit_vocabulary`` evens that out.
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
"""Words, numbers, code, mark-up, scripts, composed and decomposed letters, white space, and what may be special."""


def check_vocabulary(target_folder: Path, draft_folder: Path) -> None:
    """Raises VocabularyMismatch, which names the first token that differs."""
    target, draft = _tokenizer(target_folder), _tokenizer(draft_folder)
    names = f"{draft_folder} cannot draft for {target_folder}"
    ours, theirs = (_by_id(tokenizer) for tokenizer in (target, draft))
    for token_id in sorted(ours.keys() | theirs.keys()):
        if ours.get(token_id) != theirs.get(token_id):
            raise VocabularyMismatch(
                f"{names}: token {token_id} is {_shown(theirs.get(token_id))} to the draft and "
                f"{_shown(ours.get(token_id))} to the target"
            )
    wanted, found = (tokenizer.encode(PROBE, add_special_tokens=False) for tokenizer in (target, draft))
    for place, pair in enumerate(zip([*wanted.tokens, None], [*found.tokens, None], strict=False)):
        if pair[0] != pair[1]:
            raise VocabularyMismatch(
                f"{names}: token {place} of the probe text is {_shown(pair[1])} to the draft and {_shown(pair[0])} to "
                "the target"
            )


@torch.no_grad()
def fit_vocabulary(draft: Llama, size: int) -> None:
    """Makes the draft's matrices ``size`` rows tall, in place: what is padding at the end is cut, or added as zeros.

    Target and draft may then exchange any token id; rows that were added are never right and never wanted.
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
    found = weight.new_zeros(size, weight.shape[1])
    kept = min(size, len(weight))
    found[:kept] = weight[:kept]
    return nn.Parameter(found, requires_grad=False)


def _tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise VocabularyMismatch(f"{path} does not exist; without it nothing says that target and draft share tokens")
    try:
        found = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise VocabularyMismatch(f"{path} cannot be read: {error}") from None
    found.no_padding()
    found.no_truncation()
    return found


def _by_id(tokenizer: Tokenizer) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}


def _shown(token: str | None) -> str:
    return "nothing" if token is None else repr(token)
