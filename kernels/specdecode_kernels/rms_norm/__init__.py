"""The norm before every attention and MLP, together with the sum that it reads."""
