"""Makes the errors that a client raises when its server ends before it."""

from asyncdist import ClosedError, RankLostError, RemoteError
from asyncdist.messaging.services import Services


def ended_error(server: int, name: str, kind: str, text: str) -> RemoteError | ClosedError:
    """Return the error for a server that says why it has ended.

    Args:
        server: its rank.
        name: of its buffer.
        kind: the name of an exception of its own; empty where it has none.
        text: of that exception, or why.
    """
    what = f"the replay buffer {name!r} on rank {server} ended before its clients"
    if kind:
        return RemoteError(f"{what}: {kind}: {text}", rank=server, kind=kind, text=text)
    return ClosedError(f"{what}: {text}", rank=server)


def abandoned_error(services: Services, server: int, name: str) -> RankLostError | ClosedError:
    """Return the error for a server that is gone and has said nothing."""
    text = f"rank {server} serves the replay buffer {name!r} no more: it "
    if server in services.lost_ranks():
        return RankLostError(f"{text}is lost", rank=server)
    return ClosedError(f"{text}has left", rank=server)
