"""Attention heads that begin as copiers: they look where the text stood before, at what came next there.

Text repeats itself: names, code, lists, a small model's loops. At slot m a draft's layer sees the state of token m - 1
and the embedding of token m. So a query that says what the last tokens are, and keys that say what the tokens before
their slot were, meet where those tokens stood before, and the slot's own embedding is what followed. A head hardly
finds that by itself in a million tokens of training; here the match is there from the start, by least squares over
recorded states, and only what to make of it is learnt: what these heads say is zero at first.

Which tokens were just said is the state's affair: its three parts together tell the last token well and the one before
fairly, but what a head has learnt to fuse of them does not, so the quietest directions of the fused state are given up
for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdecode_worker.models.networks.eagle3 import Eagle3Head
from specdecode_worker.models.networks.llama import Llama
from specdecode_worker.training.data.shards import Conversation
from specdecode_worker.training.errors import CannotContinue

MOST_TOKENS = 30_000
"""Of recorded text that the match is fitted on."""
RIDGE = 1e-3
SHARPNESS = 0.25
"""Of the first head of a group; each further one is twice as sharp."""


@dataclass(frozen=True, slots=True)
class _Text:
    """Recorded tokens, each with those before it (``tokens_LN``: by lag) and the states behind it."""

    tokens_LN: Tensor
    aux_NA: Tensor

    @classmethod
    def of(cls, conversations: Sequence[Conversation], lags: int) -> _Text:
        """Raises CannotContinue when there is nothing to fit on."""
        tokens, states, count = [], [], 0
        for conversation in conversations:
            length = len(conversation.tokens_N) - lags + 1
            if length > 0 and count < MOST_TOKENS:
                by_lag = [conversation.tokens_N[lags - 1 - lag :][:length] for lag in range(lags)]
                tokens.append(torch.stack(by_lag).long())
                states.append(conversation.aux_NA[lags - 1 :].float())
                count += length
        if not tokens:
            raise CannotContinue("copiers are fitted on recorded text, and there is none yet")
        return cls(torch.cat(tokens, dim=1), torch.cat(states))


@torch.no_grad()
def with_copiers(origin: Eagle3Head, target: Llama, conversations: Sequence[Conversation], groups: int) -> Eagle3Head:
    """``origin`` with ``groups`` more key-value heads and their queries, fp32. Group g looks for the last g + 1 tokens.

    Raises CannotContinue for heads whose queries or inputs have norms or biases of their own.
    """
    _check(origin)
    config, text = origin.config, _Text.of(conversations, groups)
    queries = config.num_attention_heads // config.num_key_value_heads
    embedding = origin.embed_tokens or target.model.embed_tokens
    head = Eagle3Head(
        replace(
            config,
            num_attention_heads=config.num_attention_heads + groups * queries,
            num_key_value_heads=config.num_key_value_heads + groups,
        ),
        embedding,
        own_embedding=origin.embed_tokens is not None,
    ).float()
    own = origin.float().state_dict()
    embedding_VE = origin.midlayer.input_layernorm(embedding.weight.float())
    slow = _slow_dims(config.head_dim)
    codes = _Codes.of(embedding_VE, text.tokens_LN[0], config.head_dim)
    wanted = [
        codes.of_tokens(embedding_VE[tokens_N], len(slow) // (lag + 1)) for lag, tokens_N in enumerate(text.tokens_LN)
    ]
    own["fc.weight"] = _carrying(own["fc.weight"], text.aux_NA, torch.cat(wanted, dim=1))
    states_NE = origin.midlayer.hidden_norm(text.aux_NA @ own["fc.weight"].T)
    told = [_fitted(states_NE, code) for code in wanted]
    for group in range(groups):
        _add_group(own, codes, told, slow, group, queries)
    head.load_state_dict(own)
    return head


def _check(origin: Eagle3Head) -> None:
    config = origin.config
    odd = {
        "norms of its queries": config.qk_norm,
        "biases in its attention": config.qkv_bias or config.o_bias,
        "norms before its first layer": config.norm_before_fc or config.fc_norm,
        "no states of the target's layers": not config.aux_layers,
        "a width of its own": config.hidden_size != config.target_hidden_size,
    }
    if found := [what for what, is_so in odd.items() if is_so]:
        raise CannotContinue(f"copiers cannot be added to a head with {', '.join(found)}; leave --copiers out")


def _slow_dims(head_dim: int) -> Tensor:
    """The slower half of the rotary pairs: they hardly turn within some hundred tokens."""
    quarter = head_dim // 4
    return torch.cat((torch.arange(quarter, 2 * quarter), torch.arange(3 * quarter, 4 * quarter)))


@dataclass(frozen=True, slots=True)
class _Codes:
    """Few numbers that tell tokens apart: whitened principal parts of normed embeddings, the strongest first."""

    parts_CE: Tensor

    @classmethod
    def of(cls, embedding_VE: Tensor, tokens_N: Tensor, size: int) -> _Codes:
        """``tokens_N`` say how common each token is. The mean is projected out: queries have no bias to take it off."""
        said_NE = embedding_VE[tokens_N]
        mean_E = said_NE.mean(dim=0)
        direction_E = mean_E / mean_E.norm()
        without_EE = torch.eye(len(mean_E)) - torch.outer(direction_E, direction_E)
        spread_E, parts_EE = torch.linalg.eigh(torch.cov((said_NE @ without_EE).T))
        strongest = torch.arange(len(mean_E)).flip(0)[:size]
        scale_C = spread_E[strongest].clamp(min=1e-6 * float(spread_E.max())).sqrt()
        return cls((parts_EE[:, strongest] / scale_C).T @ without_EE)

    def of_tokens(self, embedding_NE: Tensor, size: int) -> Tensor:
        codes_NC: Tensor = embedding_NE @ self.parts_CE[:size].T
        return codes_NC


def _carrying(fc_EA: Tensor, aux_NA: Tensor, codes_NC: Tensor) -> Tensor:
    """``fc_EA`` whose quietest outputs tell the codes instead, as loud as an ordinary direction."""
    spread_E, parts_EE = torch.linalg.eigh(torch.cov((aux_NA @ fc_EA.T).T))
    quiet_EC = parts_EE[:, : codes_NC.shape[1]]
    loudness = spread_E.median().clamp(min=0).sqrt()
    changed_EA: Tensor = fc_EA - quiet_EC @ (quiet_EC.T @ fc_EA) + loudness * (quiet_EC @ _fitted(aux_NA, codes_NC))
    return changed_EA


def _fitted(inputs_NE: Tensor, wanted_NC: Tensor) -> Tensor:
    """[C, E] of the ridge regression of ``wanted_NC``, its intercept left out: in keys it would be the same for all."""
    centred_NE, wanted_NC = inputs_NE - inputs_NE.mean(dim=0), wanted_NC - wanted_NC.mean(dim=0)
    gram_EE = centred_NE.T @ centred_NE
    ridge = RIDGE * gram_EE.diagonal().mean()
    found_CE: Tensor = torch.linalg.solve(gram_EE + ridge * torch.eye(len(gram_EE)), centred_NE.T @ wanted_NC).T
    return found_CE


def _add_group(
    own: dict[str, Tensor], codes: _Codes, told: Sequence[Tensor], slow: Tensor, group: int, queries: int
) -> None:
    """Weights read the pair [embedding, state]. The state before a slot tells the token before it and those before
    that, so queries take the last token from the embedding and earlier ones from the state."""
    names = {name: f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"}
    width, size = codes.parts_CE.shape[1], len(slow) // (group + 1)
    head_dim = 2 * len(slow)
    query_DP, key_DP, value_DP = torch.zeros(3, head_dim, 2 * width)
    for lag in range(group + 1):
        dims = slow[lag * size : (lag + 1) * size]
        key_DP[dims, width:] = told[lag][:size]
        if lag == 0:
            query_DP[dims, :width] = codes.parts_CE[:size]
        else:
            query_DP[dims, width:] = told[lag - 1][:size]
    value_DP[:, :width] = codes.parts_CE[:head_dim]
    sharp = [query_DP * (SHARPNESS * 2**index * math.sqrt(head_dim)) for index in range(queries)]
    own[names["q"]] = torch.cat((own[names["q"]], *sharp))
    own[names["k"]] = torch.cat((own[names["k"]], key_DP))
    own[names["v"]] = torch.cat((own[names["v"]], value_DP))
    output_EQ = own[names["o"]]
    own[names["o"]] = torch.cat((output_EQ, output_EQ.new_zeros(len(output_EQ), queries * head_dim)), dim=1)
