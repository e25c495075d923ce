"""The demo's user: one streamed chat answer, a little traffic, or a ramp of it, with the official openai client."""

from __future__ import annotations

import argparse
import itertools
import sys
import threading
import time

import openai

_CHAT = "Explain in three sentences why the sky is blue."
_TRAFFIC = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "What is the capital of France, and what is it known for?",
    "Tell a short story about a lighthouse keeper and his dog.",
    "Write a SQL query that counts orders per customer.",
    "Explain what a hash table is to a beginner.",
    "Describe a walk through a forest in autumn.",
    "Write a Python class for a stack with push and pop.",
    "What are the three states of matter? Give an example of each.",
)
_CONCURRENCY = 2
"""What one core answers at a pace that people read; speculation gains most while few wait."""


def chat(client: openai.OpenAI, model: str) -> None:
    """Print an answer as its tokens arrive, then what it took."""
    started = time.monotonic()
    first_s = 0.0
    tokens = 0
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": _CHAT}],
        max_tokens=96,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    print(f"\n  > {_CHAT}\n  ", end="")
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            first_s = first_s or time.monotonic() - started
            print(chunk.choices[0].delta.content.replace("\n", "\n  "), end="", flush=True)
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
    seconds = time.monotonic() - started
    print(f"\n\n  {tokens} tokens in {seconds:.1f} s, the first after {first_s:.2f} s\n", flush=True)


RAMP = (1, 8, 1)
"""Clients of the stages of a ramp: at eight, one core has no idle arithmetic for drafts."""


def ramp(client: openai.OpenAI, model: str, seconds: float) -> None:
    """Run the stages of the ramp, each for some seconds, and say when one begins."""
    for clients in RAMP:
        print(f"{clients} client{'s' if clients > 1 else ''}", flush=True)
        traffic(client, model, seconds, clients)


def traffic(client: openai.OpenAI, model: str, seconds: float, clients: int = _CONCURRENCY) -> None:
    """Keep a few requests in flight for a while; a refused one is shown once and tried again."""
    deadline = time.monotonic() + seconds
    threads = [
        threading.Thread(target=_requests, args=(client, model, deadline, offset), daemon=True)
        for offset in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _requests(client: openai.OpenAI, model: str, deadline: float, offset: int) -> None:
    start = offset % len(_TRAFFIC)
    for prompt in itertools.cycle(_TRAFFIC[start:] + _TRAFFIC[:start]):
        if time.monotonic() > deadline:
            return
        try:
            client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": prompt}],
                max_tokens=128,
                temperature=0,
            )
        except openai.APIError as error:
            print(f"    request failed: {error}", file=sys.stderr)
            time.sleep(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("chat", "traffic", "ramp"))
    parser.add_argument("--url", required=True, help="of the Service, without /v1")
    parser.add_argument("--seconds", type=float, default=60, help="length of the traffic, or of a stage of the ramp")
    flags = parser.parse_args()
    direct = openai.DefaultHttpxClient(trust_env=False)  # no proxy knows the Service's address
    client = openai.OpenAI(base_url=f"{flags.url}/v1", api_key="none", timeout=120, http_client=direct)
    model = client.models.list().data[0].id
    if flags.what == "chat":
        chat(client, model)
    elif flags.what == "ramp":
        ramp(client, model, flags.seconds)
    else:
        traffic(client, model, flags.seconds)


if __name__ == "__main__":
    main()
