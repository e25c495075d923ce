"""Start of generations for a request, and internal streams: frames for a router, which another worker can continue."""
