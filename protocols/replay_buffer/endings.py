"""Creates the errors that a replay buffer's client raises if the server ends first."""

from asyncdist import ClosedError, LateError, RankLostError, RemoteError
from asyncdist.messaging.services import Services


def ended_error(server: int, name: str, kind: str, text: str) -> RemoteError | ClosedError:
    """Return the error for a server that has reported why it ended."""
    what = f"the replay buffer {name!r} on rank {server} ended before its clients"
    if kind:
        return RemoteError(f"{what}: {kind}: {text}", rank=server, kind=kind, text=text)
    return ClosedError(f"{what}: {text}", rank=server)


def abandoned_error(services: Services, server: int, name: str) -> RankLostError | ClosedError:
    """Return the error for a server that is lost, or has left without a reason."""
    text = f"rank {server} no longer serves the replay buffer {name!r}: it "
    if server in services.lost_ranks():
        return RankLostError(f"{text}is lost", rank=server)
    return ClosedError(f"{text}has left", rank=server)


def late_error(server: int, name: str) -> LateError:
    """Return the error of a restarted client whose server has ended, or does not serve in time."""
    text = f"this rank comes too late: rank {server} no longer serves the replay buffer {name!r}"
    return LateError(text, rank=server)
