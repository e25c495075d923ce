"""Drafts on a device of their own: a draft process holds weights and KV cache, and answers one message per step."""
