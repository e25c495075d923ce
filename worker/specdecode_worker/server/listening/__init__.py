"""Listeners of both ports: connections with time-outs and bounds, and TLS with certificates that are read again."""

from specdecode_worker.server.listening.listener import listening

__all__ = ["listening"]
