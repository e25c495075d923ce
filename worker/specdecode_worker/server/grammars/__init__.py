"""Grammars of answers: built from the fields of a request, and checked before the request starts."""
