"""Authenticates the processes of a job to each other with a shared secret.

A process seals each value that it writes for other processes with a keyed digest (HMAC, RFC 2104). It authenticates a
connection with a digest of the connection's two ends. Without a secret the key is empty, and seals detect corrupted
values but not attackers.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import Final

#: Minimum number of characters of a secret. Shorter secrets could be guessed.
LENGTH_MIN: Final = 16
_DIGEST: Final = "sha256"
SEAL_NBYTES: Final = hashlib.new(_DIGEST).digest_size


@dataclass(frozen=True, slots=True)
class JobSecret:
    """Seals values and authenticates connections with the job's secret.

    Attributes:
        key: The secret, hidden in ``repr``; empty if the job has none.
    """

    key: bytes = field(default=b"", repr=False)

    @property
    def is_missing(self) -> bool:
        """Whether the job has no secret, so that its processes trust every process that connects to them."""
        return not self.key

    def at_port(self, port: int) -> JobSecret:
        """Derive the secret of the job whose rendezvous store is at this port of a host.

        A user's jobs may share a secret. The derived key depends on the port, so a value that another user copies to
        the store of a job at another port is not valid there. Jobs that use one port in turn have equal keys. Random
        numbers in the ranks' greetings distinguish these jobs, so an earlier job's values can only make a start fail.
        """
        return self if self.is_missing else JobSecret(self._digest("port", str(port), b""))

    def seal(self, name: str, value: bytes) -> bytes:
        """Return ``value`` preceded by its seal: a digest of ``name`` and ``value`` with the job's secret."""
        return self._digest("value", name, value) + value

    def unseal(self, name: str, data: bytes) -> bytes | None:
        """Return the value in ``data``, which was sealed for ``name``, or None if the seal is not valid."""
        seal, value = data[:SEAL_NBYTES], data[SEAL_NBYTES:]
        return value if hmac.compare_digest(seal, self._digest("value", name, value)) else None

    def proof(self, connection: str, sender: int, receiver: int) -> bytes:
        """Return the digest by which ``sender`` proves to ``receiver`` that it knows the secret.

        The name ``connection`` must be unique among the connections of all jobs.
        """
        return self._digest("connection", connection, f"{sender} to {receiver}".encode())

    def _digest(self, use: str, name: str, value: bytes) -> bytes:
        head = name.encode("utf-8", "surrogateescape")
        return hmac.digest(self.key, b"%s %d " % (use.encode(), len(head)) + head + value, _DIGEST)


def draw() -> str:
    """Return a new random secret."""
    return secrets.token_hex(32)


def check(text: str, where: str) -> str:
    """Return a secret without surrounding white space. Raise ValueError, which names ``where``, if it is invalid."""
    text = text.strip()
    if not text.isprintable():
        raise ValueError(
            f"{where} must be one line of printable text, for example from: python -c 'import secrets; "
            "print(secrets.token_hex(32))'"
        )
    if len(text) < LENGTH_MIN:
        raise ValueError(
            f"{where} must have at least {LENGTH_MIN} characters, got {len(text)}, for example from: python -c 'import "
            "secrets; print(secrets.token_hex(32))'"
        )
    return text
