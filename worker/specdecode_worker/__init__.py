"""The data plane: an EAGLE tree-attention engine behind an OpenAI-compatible server."""
