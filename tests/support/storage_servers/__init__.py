"""Storage servers for tests, started on loopback."""
