"""Support for tests of the installed operator: tenants, stand-in workers and measures."""
