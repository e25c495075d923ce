"""Self-signed certificates for tests of TLS. They hold no address: the project checks the signature alone."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path

ELLIPTIC = ("ec", "-pkeyopt", "ec_paramgen_curve:P-256")


def self_signed(folder: Path, name: str, *more: str, key_kind: Sequence[str] = ELLIPTIC) -> tuple[Path, Path]:
    """Write a new certificate and its key to ``folder``, and return their paths; ``more`` are words for openssl."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    words = ["openssl", "req", "-x509", "-nodes", "-days", "1", "-newkey", *key_kind, *more]
    words += ["-subj", f"/CN={name}", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(words, check=True, capture_output=True)
    return certificate, key


def certified_server(folder: Path, name: str) -> tuple[Path, ssl.SSLContext]:
    """Return the path of a new certificate, and the context of a server that has it."""
    certificate, key = self_signed(folder, name)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return certificate, context
