"""A load generator over the OpenAI surface: open-loop arrivals, mixed lengths, clients that behave and others.

Knows no engine: it sees what a user sees.
"""
