"""How ranks reach the driver, and how the driver reaches ranks in detached mode."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ChannelAddress:
    """How a rank reaches the driver. Travels in a pickled job or an encrypted message."""

    host: str
    port: int
    server_key: bytes = field(repr=False)
    client_public_key: bytes = field(repr=False)
    client_secret_key: bytes = field(repr=False)


@dataclass(frozen=True)
class Call:
    """How the driver calls the stand-in of a run in detached mode.

    Attributes:
        ports: of the stand-in's host; it opens one of them.
        public_key, secret_key: of both ends.
    """

    ports: tuple[int, ...]
    public_key: bytes = field(repr=False)
    secret_key: bytes = field(repr=False)
