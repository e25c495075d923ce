"""Choice of a worker for a request, as pure functions."""
