"""The HTTP surface: OpenAI's routes, the admin port, tokens to text and back. Knows no tensor; imports no torch."""
