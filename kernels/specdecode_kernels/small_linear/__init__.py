"""Matrix product of few rows with a large matrix, fused with the norm before it and what follows it."""
