"""Merged drafts: several drafts that propose into the tree of one request."""
