"""Load generator for the OpenAI API: open-loop arrivals, mixed lengths, well-behaved and misbehaving clients.

It uses the HTTP API only and imports nothing of the engine.
"""
