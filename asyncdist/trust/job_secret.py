"""The secret that the processes of a job share, by which they believe each other.

A process proves that it knows the secret, and never shows it: it seals what it writes for others with a keyed digest
(HMAC, RFC 2104) over name and value, and answers for its connections with a digest over their ends. Without a secret
the key is empty: seals then keep out garbage, and nobody who reads this code.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import Final

#: Shorter secrets can be guessed.
LENGTH_MIN: Final = 16
_DIGEST: Final = "sha256"
SEAL_NBYTES: Final = hashlib.new(_DIGEST).digest_size


@dataclass(frozen=True, slots=True)
class JobSecret:
    """Seals and proves with the secret of a job.

    Attributes:
        key: The secret; empty if the job has none. No representation shows it.
    """

    key: bytes = field(default=b"", repr=False)

    @property
    def is_missing(self) -> bool:
        """Whether the job has no secret, so that a process believes whoever reaches it."""
        return not self.key

    def seal(self, name: str, value: bytes) -> bytes:
        """Return a value with its seal, which holds under this name alone."""
        return self._digest("value", name, value) + value

    def unseal(self, name: str, data: bytes) -> bytes | None:
        """Return the value that was sealed under this name; None if no process with the secret has sealed it."""
        seal, value = data[:SEAL_NBYTES], data[SEAL_NBYTES:]
        return value if hmac.compare_digest(seal, self._digest("value", name, value)) else None

    def proof(self, connection: str, sender: int, receiver: int) -> bytes:
        """Return the digest by which ``sender`` proves to ``receiver`` that it knows the secret.

        Args:
            connection: A name that no other connection of this job, or of another one, has.
            sender: The place of the process that proves it.
            receiver: The place of the process that is to believe it.
        """
        return self._digest("connection", connection, f"{sender} to {receiver}".encode())

    def _digest(self, use: str, name: str, value: bytes) -> bytes:
        head = name.encode("utf-8", "surrogateescape")
        return hmac.digest(self.key, b"%s %d " % (use.encode(), len(head)) + head + value, _DIGEST)


def draw() -> str:
    """Return a new secret."""
    return secrets.token_hex(32)


def check(text: str, where: str) -> str:
    """Return a secret that a user has given.

    Args:
        text: The secret. White space around it does not count.
        where: Where it was found, for the error.

    Raises:
        ValueError: It is too short, or not text that an environment variable can hold. The error does not show it.
    """
    text = text.strip()
    if not text.isprintable():
        raise ValueError(
            f"{where} has bytes that are not printable text; needed is one line of text, for example from: "
            "python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    if len(text) < LENGTH_MIN:
        raise ValueError(
            f"{where} has {len(text)} characters; a secret of at least {LENGTH_MIN} is needed, for example from: "
            "python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return text
