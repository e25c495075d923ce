"""Queue of requests whose grammars are being compiled, in a thread, so that steps of other requests go on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

from specdecode_worker.engine.request import Request
from specdecode_worker.engine.sampling_params import blocked_tokens
from specdecode_worker.guided.errors import GrammarRefused, library_message
from specdecode_worker.guided.grammar_compiler import GrammarCompiler
from specdecode_worker.guided.guide import Guide


class GrammarQueue:
    """Requests that wait for their grammars. They join the scheduler's queue once these are compiled."""

    def __init__(self, compiler: GrammarCompiler | None, eos_token_ids: tuple[int, ...]) -> None:
        """Create an empty queue. Without a compiler no request may have a grammar."""
        self._compiler, self._eos_token_ids = compiler, eos_token_ids
        self._waiting: dict[str, tuple[Request, Future[Guide]]] = {}
        self._thread: ThreadPoolExecutor | None = None

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request.id in self._waiting

    def add(self, request: Request) -> None:
        """Start the compilation of a request's grammar.

        Raises:
            ValueError: This engine has no tokenizer, so it cannot follow a grammar.
        """
        compiler, sampling = self._compiler, request.submit.sampling
        if compiler is None:
            raise ValueError("this engine has no tokenizer, so answers cannot follow a grammar")
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        blocked = blocked_tokens(request.submit, self._eos_token_ids)

        def compile_grammar() -> Guide:
            return compiler.guide(sampling.grammar, min_tokens=sampling.min_tokens, blocked=blocked)

        self._waiting[request.id] = request, self._thread.submit(compile_grammar)

    def discard(self, request: Request) -> None:
        """Remove a cancelled request. A compilation under way ends by itself."""
        _, future = self._waiting.pop(request.id)
        future.cancel()

    def take_ready(self, wait_seconds: float = 0.0) -> Iterator[tuple[Request, str]]:
        """Remove the requests whose compilations have ended, and yield each with the reason of a refusal.

        The reason is empty for a request that can run; its ``guide`` is set.

        Args:
            wait_seconds: Time to wait for the first one.
        """
        if wait_seconds and self._waiting:
            wait([future for _, future in self._waiting.values()], wait_seconds, return_when="FIRST_COMPLETED")
        for request, future in [pair for pair in self._waiting.values() if pair[1].done()]:
            del self._waiting[request.id]
            try:
                guide = future.result()
            except GrammarRefused as error:
                yield request, error.message
                continue
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # a panic of the library is not an Exception
                yield request, f"the grammar library failed: {library_message(str(error))}"
                continue
            request.guide = guide
            # These are the output of an earlier attempt on another worker.
            guide.advance(request.tokens[len(request.submit.prompt) :])
            yield request, "the tokens to continue are a complete answer" if guide.ended else guide.error

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
