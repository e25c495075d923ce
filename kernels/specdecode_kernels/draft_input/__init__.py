"""What an EAGLE head reads: a token's embedding beside a hidden state."""
