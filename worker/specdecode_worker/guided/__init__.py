"""Guided decoding: grammars of requests, their compilation, and the token masks that follow from them.

The package knows token ids, bytes and grammars, and neither torch nor requests. The HTTP server builds and checks a
grammar; the engine compiles it again and walks it with the tokens of a request. Library: llguidance.
"""
