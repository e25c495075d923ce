"""Recording of conversations into shards, from a rollout or from a text file. A killed recording resumes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from specdecode_worker.models.configs.target_states import TargetStates
from specdecode_worker.models.networks.llama import Llama
from specdecode_worker.training.data.chat_tokens import Chat
from specdecode_worker.training.data.shards import SHARD_TOKENS, Conversation, read_shard, shard_paths, write_shard
from specdecode_worker.training.errors import PromptFileError

_TEXT_TOKENS = 384  # tokens of one piece of a text file


def answer_tokens(folder: Path) -> int:
    """Return the number of answer tokens in a folder of shards."""
    return sum(len(c.tokens_N) - c.answer_start for path in shard_paths(folder) for c in read_shard(path))


def record(
    conversations: Iterable[Conversation],
    folder: Path,
    *,
    tokens: int,
    log: Callable[[str], None],
    shard_tokens: int = SHARD_TOKENS,
) -> None:
    """Write shards until ``folder`` holds about ``tokens`` answer tokens or the conversations end.

    About ``shard_tokens`` tokens with their states are held in memory.
    """
    folder.mkdir(parents=True, exist_ok=True)
    already = total = answer_tokens(folder)
    started = time.monotonic()
    waiting: list[Conversation] = []
    source = iter(conversations)
    while total < tokens:
        conversation = next(source, None)
        waiting += [conversation] if conversation else []
        answers = sum(len(c.tokens_N) - c.answer_start for c in waiting)
        full = sum(len(c.tokens_N) for c in waiting) >= shard_tokens or total + answers >= tokens
        if waiting and (full or conversation is None):
            write_shard(folder, len(shard_paths(folder)), waiting)
            total, waiting = total + answers, []
            rate = (total - already) / (time.monotonic() - started)
            left = max(tokens - total, 0) / rate / 60
            log(f"recording: {total} of {tokens} answer tokens, {rate:.0f} tokens/s, {left:.1f} min left")
        if conversation is None:
            return


def text_conversations(target: Llama, chat: Chat, path: Path, skip_tokens: int) -> Iterator[Conversation]:
    """Yield pieces of a text file with the target's states. All tokens of a piece but the first count as answer.

    The text is not the target's own, so training on it is off-policy, but recording it is cheap.

    Raises:
        PromptFileError: The file cannot be read as text.
    """
    try:
        ids = chat.encode(path.read_text())[skip_tokens:]
    except (OSError, UnicodeDecodeError) as error:
        raise PromptFileError(f"{path} cannot be read as text: {error}") from None
    for start in range(0, len(ids), _TEXT_TOKENS):
        piece = torch.tensor(ids[start : start + _TEXT_TOKENS])
        if len(piece) > 2:
            aux_NA, hidden_NE = read_states(target, piece)
            yield Conversation(piece.int(), aux_NA, hidden_NE, answer_start=1, temperature=0.0, domain="text")


@torch.inference_mode()
def read_states(target: Llama, tokens_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the target's layer states [N, 3E] and last hidden state [N, E] over one text, on the CPU."""
    device = target.lm_head.weight.device
    positions_N = torch.arange(len(tokens_N), device=device)
    out = target(tokens_N.to(device), positions_N, causal_attention, TargetStates(target.config.aux_layers))
    assert isinstance(out.aux_TA, Tensor)
    return out.aux_TA.cpu(), out.hidden_TE.cpu()


def causal_attention(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    """Return causal attention over one text."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
