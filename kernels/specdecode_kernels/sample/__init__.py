"""From logits to the distribution that a request asked for."""
