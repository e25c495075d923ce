"""A request's sampling parameters as the law that speculation applies."""

from __future__ import annotations

from specdecode_worker.engine.ipc.messages import Submit
from specdecode_worker.speculation.sampling.params import Law


def law_of(submit: Submit, eos_token_ids: tuple[int, ...]) -> Law:
    """As in vLLM, ``min_tokens`` holds back the model's ends of text even where ``ignore_eos`` takes them for words."""
    sampling = submit.sampling
    bias: dict[int, float] = {}
    for token, value in sampling.logit_bias:
        bias[token] = bias.get(token, 0.0) + value
    return Law(
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=tuple(bias.items()),
        min_tokens=sampling.min_tokens,
        blocked=tuple(sorted({*sampling.stop_token_ids, *eos_token_ids})) if sampling.min_tokens else (),
        prompt_tokens=len(submit.prompt),
    )


def check_tokens(law: Law, vocab_size: int) -> None:
    """Raises ValueError for token ids that the model does not have."""
    strange = [token for token, _ in law.logit_bias if not 0 <= token < vocab_size]
    strange += [token for token in law.blocked if not 0 <= token < vocab_size]
    if strange:
        raise ValueError(
            f"token ids {strange[:5]} in logit_bias or stop_token_ids are not the model's: they run from 0 to "
            f"{vocab_size - 1}"
        )
