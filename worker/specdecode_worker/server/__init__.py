"""HTTP server of the worker: OpenAI-compatible API, admin port and tokenization. It does not import torch."""
