"""Support for tests of the operator: objects, fleets and processes."""
