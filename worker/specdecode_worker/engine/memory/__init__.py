"""Memory budget of a worker: what models and caches need and what the device has."""
