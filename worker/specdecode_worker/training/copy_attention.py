"""Copy attention heads: initial weights that attend to earlier occurrences of the last tokens and read what followed.

Text repeats itself: names, code, lists, a small model's loops. At slot m a draft's layer sees the state of token m - 1
and the embedding of token m. A query that encodes the last tokens, and keys that encode the tokens before their slot,
match where those tokens occurred before, and the embedding of the slot is the token that followed. A head rarely learns
this from a million training tokens. Here the match is fitted beforehand by least squares over recorded states, and
training learns only to use it: the output of these heads starts at zero.

The match needs the last tokens from the state. The three layer states that the head fuses determine the last token well
and the one before fairly, but the fused state of a trained head does not. Its directions of lowest variance are
therefore replaced by the codes of these tokens.

Shape suffixes: N recorded tokens, L lags, A width of the three layer states, E hidden size, C code size, D head size, P
width of the pair [embedding, state], V vocabulary, Q width of all query heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.eagle import Eagle3Head
from specdecode_worker.training.conversations import Conversation
from specdecode_worker.training.errors import DraftNotTrainable

MOST_TOKENS = 30_000
"""Most tokens of recorded text that the match is fitted on."""
RIDGE = 1e-3
SHARPNESS = 0.25
"""Scale of the queries of the first head of a group. Each further head has twice the scale of the one before."""


@dataclass(frozen=True, slots=True)
class _Text:
    """Recorded tokens with the tokens before them (``tokens_LN``, by lag) and their layer states."""

    tokens_LN: Tensor
    aux_NA: Tensor

    @classmethod
    def of(cls, conversations: Sequence[Conversation], lags: int) -> _Text:
        """Return the text of ``conversations``, up to ``MOST_TOKENS`` tokens.

        Raises:
            DraftNotTrainable: There is no recorded text.
        """
        tokens, states, count = [], [], 0
        for conversation in conversations:
            length = len(conversation.tokens_N) - lags + 1
            if length > 0 and count < MOST_TOKENS:
                by_lag = [conversation.tokens_N[lags - 1 - lag :][:length] for lag in range(lags)]
                tokens.append(torch.stack(by_lag).long())
                states.append(conversation.aux_NA[lags - 1 :].float())
                count += length
        if not tokens:
            raise DraftNotTrainable("copiers are fitted on recorded text, and there is none yet")
        return cls(torch.cat(tokens, dim=1), torch.cat(states))


@torch.no_grad()
def add_copy_heads(
    origin: Eagle3Head, target: CausalLM, conversations: Sequence[Conversation], groups: int
) -> Eagle3Head:
    """Return ``origin`` in fp32 with ``groups`` more key-value heads and their queries.

    The heads of group g match the last g + 1 tokens.

    Raises:
        DraftNotTrainable: The head has norms or biases at its queries or inputs, or a width of its own.
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
    embedding_VE = origin.midlayer.input_layernorm(embedding.weight.float().cpu())
    slow = _slow_dims(config.head_dim)
    codes = _Codes.of(embedding_VE, text.tokens_LN[0], config.head_dim)
    wanted = [
        codes.of_tokens(embedding_VE[tokens_N], len(slow) // (lag + 1)) for lag, tokens_N in enumerate(text.tokens_LN)
    ]
    own["fc.weight"] = _carrying(own["fc.weight"], text.aux_NA, torch.cat(wanted, dim=1))
    states_NE = origin.midlayer.hidden_norm(text.aux_NA @ own["fc.weight"].T)
    key_projections = [_fitted(states_NE, code) for code in wanted]
    for group in range(groups):
        _add_group(own, codes, key_projections, slow, group, queries)
    head.load_state_dict(own)
    return head


def _check(origin: Eagle3Head) -> None:
    """Raise DraftNotTrainable if the architecture of ``origin`` does not allow copy heads."""
    config = origin.config
    odd = {
        "norms of its queries": config.qk_norm,
        "biases in its attention": config.qkv_bias or config.o_bias,
        "norms before its first layer": config.norm_before_fc or config.fc_norm,
        "no states of the target's layers": not config.aux_layers,
        "a width of its own": config.hidden_size != config.target_hidden_size,
    }
    if obstacles := [what for what, is_so in odd.items() if is_so]:
        raise DraftNotTrainable(f"copiers cannot be added to a head with {', '.join(obstacles)}; leave --copiers out")


def _slow_dims(head_dim: int) -> Tensor:
    """Return the slower half of the rotary dimensions, which hardly rotate within some hundred tokens."""
    quarter = head_dim // 4
    return torch.cat((torch.arange(quarter, 2 * quarter), torch.arange(3 * quarter, 4 * quarter)))


@dataclass(frozen=True, slots=True)
class _Codes:
    """Short codes that distinguish tokens: whitened principal components of normed embeddings, the strongest first."""

    parts_CE: Tensor

    @classmethod
    def of(cls, embedding_VE: Tensor, tokens_N: Tensor, size: int) -> _Codes:
        """Return the codes of size ``size`` fitted on ``tokens_N``, which give the frequency of each token.

        The mean is projected out, because queries have no bias to subtract it.
        """
        said_NE = embedding_VE[tokens_N]
        mean_E = said_NE.mean(dim=0)
        direction_E = mean_E / mean_E.norm()
        without_EE = torch.eye(len(mean_E)) - torch.outer(direction_E, direction_E)
        spread_E, parts_EE = torch.linalg.eigh(torch.cov((said_NE @ without_EE).T))
        strongest = torch.arange(len(mean_E)).flip(0)[:size]
        scale_C = spread_E[strongest].clamp(min=1e-6 * float(spread_E.max())).sqrt()
        return cls((parts_EE[:, strongest] / scale_C).T @ without_EE)

    def of_tokens(self, embedding_NE: Tensor, size: int) -> Tensor:
        """Return the first ``size`` components of the codes of these embeddings, [N, C]."""
        codes_NC: Tensor = embedding_NE @ self.parts_CE[:size].T
        return codes_NC


def _carrying(fc_EA: Tensor, aux_NA: Tensor, codes_NC: Tensor) -> Tensor:
    """Return ``fc_EA`` with its outputs of lowest variance replaced by the codes, scaled to the median variance."""
    spread_E, parts_EE = torch.linalg.eigh(torch.cov((aux_NA @ fc_EA.T).T))
    quiet_EC = parts_EE[:, : codes_NC.shape[1]]
    loudness = spread_E.median().clamp(min=0).sqrt()
    changed_EA: Tensor = fc_EA - quiet_EC @ (quiet_EC.T @ fc_EA) + loudness * (quiet_EC @ _fitted(aux_NA, codes_NC))
    return changed_EA


def _fitted(inputs_NE: Tensor, wanted_NC: Tensor) -> Tensor:
    """Return the ridge regression of ``wanted_NC`` on ``inputs_NE``, [C, E].

    The intercept is left out: in keys it would add the same to every score.
    """
    centred_NE, wanted_NC = inputs_NE - inputs_NE.mean(dim=0), wanted_NC - wanted_NC.mean(dim=0)
    gram_EE = centred_NE.T @ centred_NE
    ridge = RIDGE * gram_EE.diagonal().mean()
    weights_CE: Tensor = torch.linalg.solve(gram_EE + ridge * torch.eye(len(gram_EE)), centred_NE.T @ wanted_NC).T
    return weights_CE


def _add_group(
    own: dict[str, Tensor], codes: _Codes, key_projections: Sequence[Tensor], slow: Tensor, group: int, queries: int
) -> None:
    """Add the weights of group ``group`` to the state dict ``own``.

    The weights read the pair [embedding, state]. The state before a slot encodes the token before the slot and those
    before that one. Queries therefore take the last token from the embedding and earlier ones from the state.
    """
    names = {name: f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"}
    width, size = codes.parts_CE.shape[1], len(slow) // (group + 1)
    head_dim = 2 * len(slow)
    query_DP, key_DP, value_DP = torch.zeros(3, head_dim, 2 * width)
    for lag in range(group + 1):
        dims = slow[lag * size : (lag + 1) * size]
        key_DP[dims, width:] = key_projections[lag][:size]
        if lag == 0:
            query_DP[dims, :width] = codes.parts_CE[:size]
        else:
            query_DP[dims, width:] = key_projections[lag - 1][:size]
    value_DP[:, :width] = codes.parts_CE[:head_dim]
    sharp = [query_DP * (SHARPNESS * 2**index * math.sqrt(head_dim)) for index in range(queries)]
    own[names["q"]] = torch.cat((own[names["q"]], *sharp))
    own[names["k"]] = torch.cat((own[names["k"]], key_DP))
    own[names["v"]] = torch.cat((own[names["v"]], value_DP))
    output_EQ = own[names["o"]]
    own[names["o"]] = torch.cat((output_EQ, output_EQ.new_zeros(len(output_EQ), queries * head_dim)), dim=1)
