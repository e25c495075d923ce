"""Messages, requests, rows of a step, KV cache and device state, which the engine and all drafters use."""
