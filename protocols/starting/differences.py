"""Says why the ranks of a policy cannot start it together: other ranks, or other models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from asyncdist import DisagreementError, Group, StartTimeoutError, World
from asyncdist.collectives.agreed_start import Start
from asyncdist.collectives.agreement.agreements import Agreements
from asyncdist.collectives.agreement.messages import Meeting
from asyncdist.tensors.flat_state import Fingerprint, first_difference

#: What members compare of the parameters that parameters="trainable" leaves out.
LEFT_OUT: Final = "the hash of the parameters that are not trained"
#: What members say that start a policy since their memory was exhausted. Of all differences it is named first.
BEGINS_AGAIN: Final = "a start after exhausted memory"
_WHOSE_START: Final = "a policy's ranks are those of its group=, by default all"


@contextlib.contextmanager
def told_of_rivals(agreements: Agreements, meeting: Meeting) -> Iterator[None]:
    """Agree on the start of a policy in the body. An error about its ranks names the argument that decides them.

    Raises:
        DisagreementError: Ranks wait for each other: in different starts, or one in a start and one in a replay buffer.
    """
    try:
        with agreements.rivals.starting(meeting):
            yield
    except DisagreementError as error:
        if error.facts.get("difference") != "ranks" or "group=" in error.message:
            raise
        hint = f"{_WHOSE_START}, and a reserved coordinator that is no member; coordinator= is equal on all"
        raise DisagreementError(f"{error.message}; {hint}", **error.facts) from None


@contextlib.contextmanager
def told_of_missing(rank: int) -> Iterator[None]:
    """Start a policy in the body. Where ranks are missing, the error names the argument that decides which start it.

    Args:
        rank: This rank.

    Raises:
        StartTimeoutError: Some ranks did not come in time.
    """
    try:
        yield
    except StartTimeoutError as error:
        if rank in error.missing:
            raise
        raise StartTimeoutError(f"{error.message}; {_WHOSE_START}", **error.facts) from None


async def explained(
    error: DisagreementError,
    world: World,
    ranks: Sequence[int],
    mine: Fingerprint,
    start: Start[Any],
    timeout_s: float,
) -> DisagreementError:
    """Return an error of the start that says where models differ, or how to make frozen parameters equal.

    Where the models differ is found out together with all members, which know that they do. In a group of its own: the
    caller of a start that was given up may be calling something else in the policy's.

    Args:
        error: of the start.
        world: the policy's.
        ranks: of the policy's group.
        mine: this rank's model.
        start: of the policy.
        timeout_s: how long making the group may take.

    Returns:
        The error, unchanged where it is about something else.
    """
    difference = error.facts.get("difference")
    if difference == LEFT_OUT:
        return DisagreementError(
            f"{error.message}; parameters='trainable' leaves these alone, so they must be equal on all ranks: "
            "load the same weights everywhere, or pass parameters='all'",
            **error.facts,
        )
    if difference != "model":
        return error
    async with await world.peers.groups.new_group(ranks, timeout_s, part_of=start) as group:
        return await _difference_in(group, world, mine) or error


async def _difference_in(group: Group, world: World, mine: Fingerprint) -> DisagreementError | None:
    first, collectives = group.ranks[0], world.collectives
    text = mine.to_text().encode()
    length = await collectives.broadcast(torch.tensor(len(text), device="cpu"), group, first)
    if world.rank == first:
        theirs = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    else:
        theirs = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    await collectives.broadcast(theirs, group, first)
    first_model = Fingerprint.from_text(bytes(theirs.numpy()).decode())
    difference = _wrapping(mine, first_model) or first_difference(mine, first_model)
    note = f"{difference} (here: rank {world.rank}, there: rank {first})" if difference else ""
    found = torch.zeros(512, dtype=torch.uint8, device="cpu")
    encoded = note.encode()[: found.numel()]
    found.numpy()[: len(encoded)] = list(encoded)
    for other in await collectives.all_gather(found, group):
        said = bytes(other.numpy()).rstrip(b"\0").decode(errors="ignore")
        if said:
            return DisagreementError(f"the models differ: {said}", difference="model")
    return None


def _wrapping(mine: Fingerprint, theirs: Fingerprint) -> str | None:
    """Describe what one rank has wrapped its model in and the other has not; None if that is not how they differ."""
    for long, short, where in ((mine, theirs, "here and not there"), (theirs, mine, "there and not here")):
        prefix = long.lines[0][0][0].removesuffix(short.lines[0][0][0])
        wrapped = [tuple(prefix + name for name in names) for names, *_ in short.lines]
        if prefix and wrapped == [names for names, *_ in long.lines]:
            by = " by torch.compile" if prefix == "_orig_mod." else ""
            return f"it is wrapped{by} {where}, so that all names begin with {prefix!r}: wrap it alike on all ranks"
    return None
