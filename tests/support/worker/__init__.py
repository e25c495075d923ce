"""Support for tests of the worker: small engines, folders, captures, and a fake engine process."""
