"""Matrix product of few rows with a large matrix, fused with what follows it."""
