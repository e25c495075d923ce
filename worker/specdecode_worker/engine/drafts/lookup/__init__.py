"""Drafts that are looked up in earlier text, without a network: in the prompt (ngram) or in a suffix tree."""
