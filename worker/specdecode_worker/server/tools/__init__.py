"""Streaming parsers of tool calls in generated text, one for each format in which models write them."""
