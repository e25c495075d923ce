"""Earlier attempt of a request on another worker, as a router sends it: checked and converted for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from specdecode_worker.contract import internal_stream as contract
from specdecode_worker.engine.ipc.messages import Logprobs, Sampling
from specdecode_worker.server.errors import BadRequest, Incompatible
from specdecode_worker.server.request_sampling import ModelLimits
from specdecode_worker.server.requests import CompletionRequest, GenerationRequest
from specdecode_worker.server.streams.choice_output import Progress

_decode_sampling = msgspec.msgpack.Decoder(Sampling).decode


@dataclass(frozen=True, slots=True)
class EarlierChoice:
    """Choice of an earlier attempt: its sampling parameters and its output so far."""

    sampling: Sampling
    progress: Progress


def earlier_choices(
    request: GenerationRequest, resume: contract.Resume, key: str, limits: ModelLimits
) -> list[EarlierChoice]:
    """Return the choices of an earlier attempt.

    Args:
        request: The validated request body.
        resume: Start and progress of the attempt.
        key: Compatibility key of this worker.
        limits: Limits of the model.

    Raises:
        Incompatible: The attempt ran on a worker whose text may differ, or it does not fit this worker.
        BadRequest: The attempt does not belong to the request.
    """
    start = resume.open
    if start.compatibility_key != key:
        raise Incompatible("this worker cannot continue the request: its compatibility key differs")
    prompts = len(request.prompt) if isinstance(request, CompletionRequest) else 1
    made = request.generated_choices
    if len(start.prompts) != prompts or not all(start.prompts):
        raise _no_attempt("the number of prompts")
    if len(start.choices) != prompts * made or len(resume.choices) != len(start.choices):
        raise _no_attempt("the number of choices")
    if [choice.prompt for choice in start.choices] != [index // made for index in range(len(start.choices))]:
        raise _no_attempt("the prompt of a choice")
    return [
        _earlier_choice(choice, start.prompts[choice.prompt], progress, limits)
        for choice, progress in zip(start.choices, resume.choices, strict=True)
    ]


def sampling_of_rest(sampling: Sampling, emitted: Sequence[int]) -> Sampling:
    """Return the sampling parameters for the rest of a choice with these tokens.

    The log-probabilities of its prompt came with its first token.
    """
    if emitted and sampling.prompt_logprobs is not None:
        return msgspec.structs.replace(sampling, prompt_logprobs=None)
    return sampling


def contract_logprobs(logprobs: Sequence[Logprobs]) -> tuple[contract.Logprobs, ...]:
    """Return log-probabilities as frames have them, without the token."""
    return tuple((one.logprob, one.rank, one.top_tokens, one.top_logprobs) for one in logprobs)


def _earlier_choice(
    choice: contract.ChoiceStart, prompt: Sequence[int], progress: contract.ChoiceProgress, limits: ModelLimits
) -> EarlierChoice:
    try:
        sampling = _decode_sampling(choice.sampling)
    except msgspec.MsgspecError:
        raise _no_attempt("the sampling parameters of a choice") from None
    if len(prompt) + sampling.max_tokens > limits.max_model_len:
        raise Incompatible("this worker cannot continue the request: its context length is too small")
    if not all(0 <= token < limits.vocab_size for token in (*prompt, *progress.ids)):
        raise _no_attempt("a token id")
    return EarlierChoice(
        sampling,
        Progress(
            ids=progress.ids,
            logprobs=_with_tokens(progress.ids, progress.logprobs),
            prompt_logprobs=_with_tokens(prompt[1:], progress.prompt_logprobs),
            counters=progress.counters,
        ),
    )


def _with_tokens(ids: Sequence[int], logprobs: Sequence[contract.Logprobs]) -> tuple[Logprobs, ...]:
    """Return log-probabilities with their tokens; none if there are none."""
    if logprobs and len(logprobs) != len(ids):
        raise _no_attempt("the number of log-probabilities")
    return tuple(Logprobs(token, *one) for token, one in zip(ids, logprobs, strict=False))


def _no_attempt(what: str) -> BadRequest:
    return BadRequest(f"resume is no attempt of this request: {what} is wrong", param="resume", code="invalid_value")
