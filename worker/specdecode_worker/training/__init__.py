"""Training and evaluation of draft networks, from recorded target output or captured traffic."""
