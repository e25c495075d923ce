"""What engine and drafts share: messages, requests, rows of a step, the KV cache, and state on the device."""
