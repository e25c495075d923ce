"""Support for end-to-end tests: releases, clients and faults on a cluster."""
