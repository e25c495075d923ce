"""Support for tests of faults of one worker: hostile clients and bounds."""
