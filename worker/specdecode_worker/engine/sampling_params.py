"""Conversion of a request's sampling parameters into the form that speculation applies (``SamplingParams``)."""

from __future__ import annotations

from specdecode_worker.engine.ipc.messages import Submit
from specdecode_worker.speculation.sampling.params import SamplingParams


def sampling_params_of(submit: Submit, eos_token_ids: tuple[int, ...]) -> SamplingParams:
    """Return the sampling parameters of a request.

    As in vLLM, ``min_tokens`` blocks the model's end-of-text tokens even if ``ignore_eos`` makes them ordinary tokens.
    The masks of a guided request do so themselves: a grammar that allows no other token takes precedence.
    """
    sampling = submit.sampling
    guided = bool(sampling.grammar)
    bias: dict[int, float] = {}
    for token, value in sampling.logit_bias:
        bias[token] = bias.get(token, 0.0) + value
    return SamplingParams(
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=tuple(bias.items()),
        min_tokens=0 if guided else sampling.min_tokens,
        blocked=() if guided else blocked_tokens(submit, eos_token_ids),
        prompt_tokens=len(submit.prompt),
        guided=guided,
    )


def blocked_tokens(submit: Submit, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens that a request must not choose before ``min_tokens`` answer tokens."""
    sampling = submit.sampling
    return tuple(sorted({*sampling.stop_token_ids, *eos_token_ids})) if sampling.min_tokens else ()


def check_tokens(params: SamplingParams, vocab_size: int) -> None:
    """Raise ValueError if a token id in logit_bias or stop_token_ids is outside of the vocabulary."""
    strange = [token for token, _ in params.logit_bias if not 0 <= token < vocab_size]
    strange += [token for token in params.blocked if not 0 <= token < vocab_size]
    if strange:
        raise ValueError(
            f"token ids {strange[:5]} in logit_bias or stop_token_ids are not the model's: they run from 0 to "
            f"{vocab_size - 1}"
        )
