"""Input of an EAGLE head: a token embedding concatenated with a hidden state."""
