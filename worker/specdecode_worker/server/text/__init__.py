"""Convert between text and token ids: tokenizer, chat template, detokenizer and stop strings."""
