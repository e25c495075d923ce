"""One engine step on the device: pack, draft, verify, accept and copy back to the host."""
