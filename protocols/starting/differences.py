"""Explains errors of a policy's start, such as different ranks or models on its members."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

from asyncdist import (
    DisagreementError,
    Group,
    StartTimeoutError,
    World,
    compute_and_broadcast,
    reduce_and_broadcast,
)
from asyncdist.collectives.agreed_start import Start
from asyncdist.collectives.agreement.agreements import Agreements
from asyncdist.collectives.agreement.messages import Meeting
from asyncdist.tensors.flat_state import Fingerprint, first_difference

#: Name, in error messages, of the checksum of the parameters that parameters="trainable" excludes.
LEFT_OUT: Final = "the hash of the parameters that are not trained"
#: Name, in error messages, of the checksum of weights that must be equal on all ranks, as in DiLoCo.
FIRST_WEIGHTS: Final = "the checksum of the first weights"
#: Name, in error messages, of the number of completed rounds of each fragment or, in asynchronous DiLoCo, of whether a
#: rank starts from a saved state.
ROUNDS: Final = "rounds completed"
RESUMED: Final = "begins with a saved state"
#: Name of the number of steps before a resume with another schedule.
STEPS: Final = "steps before the resume"
#: Name of the value that marks a restart after exhausted memory. A difference in this value is reported first.
BEGINS_AGAIN: Final = "a start after exhausted memory"
_SAVED: Final = (
    "load a saved state on all ranks or on none. On a rank without its own checkpoint, as after a resume on more "
    "ranks, "
)
#: What to do about a difference, by the name of the value that differs.
_CURES: Final = {
    LEFT_OUT: "with parameters='trainable' the other parameters must be equal on all ranks: load the same weights on "
    "all ranks, or pass parameters='all'",
    FIRST_WEIGHTS: "all ranks of this policy must begin with equal weights: call torch.manual_seed(seed) with the same "
    "seed on all ranks before the model is created, load the same weights or checkpoint on all ranks, or call "
    "asyncdist.average_models(model) (asyncdist.blocking.average_models without coroutines) if the model has been "
    "trained before",
    STEPS: "ranks that were saved after different numbers of steps must resume with the average_every, fragments, "
    'overlap_steps, warmup_steps, late and quorum with which they were saved, or with late="skip"',
    ROUNDS: f"{_SAVED}load the state of one of the saved ranks",
    RESUMED: f"{_SAVED}call asyncdist.load_population",
}
_WHOSE_START: Final = "a policy's ranks are the ranks of its group=, by default all"


@contextlib.contextmanager
def explaining_conflicts(agreements: Agreements, meeting: Meeting) -> Iterator[None]:
    """While the body starts a policy, raise an error if ranks wait for each other in different starts.

    Raises:
        DisagreementError: Some ranks start a policy with other ranks, or wait in a replay buffer. The message hints at
            ``group=``.
    """
    try:
        with agreements.rivals.starting(meeting):
            yield
    except DisagreementError as error:
        if error.facts.get("difference") != "ranks" or "group=" in error.message:
            raise
        hint = f"{_WHOSE_START}, and a reserved coordinator; pass equal group= and coordinator= on all ranks"
        raise DisagreementError(f"{error.message}; {hint}", **error.facts) from None


@contextlib.contextmanager
def explaining_missing(rank: int) -> Iterator[None]:
    """Add a hint about ``group=`` to a StartTimeoutError raised in the body, which starts a policy."""
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
    """Return a failed start's error with details: how the models differ, or how to make weights equal.

    All members have the same error, and must call this function. If their models differ, they compare them in a new
    group, because the policy's group may already be in use after a cancelled start.

    Returns:
        A more detailed error, or ``error`` itself if it has another reason.
    """
    difference = error.facts.get("difference")
    if difference in _CURES:
        return DisagreementError(f"{error.message}; {_CURES[difference]}", **error.facts)
    if difference != "model":
        return error
    async with await world.peers.groups.new_group(ranks, timeout_s, part_of=start) as group:
        return await _difference_in(group, world, mine) or error


async def _difference_in(group: Group, world: World, mine: Fingerprint) -> DisagreementError | None:
    first = group.ranks[0]
    theirs = Fingerprint.from_text(await compute_and_broadcast(mine.to_text, group=group, world=world))
    difference = _wrapping(mine, theirs) or first_difference(mine, theirs)
    note = f"{difference} (here: rank {world.rank}, there: rank {first})" if difference else ""
    found: str = await reduce_and_broadcast(
        lambda: note, lambda notes: next(filter(None, notes), ""), group=group, world=world
    )
    return DisagreementError(f"the models differ: {found}", difference="model") if found else None


def _wrapping(mine: Fingerprint, theirs: Fingerprint) -> str | None:
    """Describe the difference if only one model is wrapped, as by torch.compile. Otherwise return None."""
    for long, short, where in ((mine, theirs, "here and not there"), (theirs, mine, "there and not here")):
        prefix = long.lines[0][0][0].removesuffix(short.lines[0][0][0])
        wrapped = [tuple(prefix + name for name in names) for names, *_ in short.lines]
        if prefix and wrapped == [names for names, *_ in long.lines]:
            by = " by torch.compile" if prefix == "_orig_mod." else ""
            return (
                f"the model is wrapped{by} {where}, so that all names begin with {prefix!r}; wrap the model on all "
                "ranks or on none"
            )
    return None
