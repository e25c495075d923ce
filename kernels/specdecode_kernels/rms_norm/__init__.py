"""RMS norm fused with the residual sum that it reads."""
