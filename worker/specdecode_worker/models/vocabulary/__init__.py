"""Vocabularies: the bytes of tokens, and which tokens two tokenizers share. No module imports torch."""
