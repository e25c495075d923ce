"""Sources of worker addresses: a fixed list, or EndpointSlices of the API server."""
