"""Finds the policy that runs on the other ranks, and asks to be admitted to it.

A newcomer asks all live ranks, again and again until it is admitted, since the rank that coordinates may change, or not
have heard of it yet. The one that coordinates the policy compares class, name, model and options, and answers with what
the newcomer needs to talk to the members. A rank that has left the policy says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from asyncdist import AsyncdistError, ClosedError, DisagreementError, LateError, RankLostError, StartTimeoutError
from asyncdist.messaging import wire
from asyncdist.messaging.services import Services
from asyncdist.waits import WaitId, WaitKind

#: How long a newcomer waits at least before it asks again, in seconds; longer where answers take longer.
_ASK_AGAIN_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Request:
    """Newcomer to all: it asks to be admitted to the policy that agrees in what ``digest`` stands for.

    It is short: all newcomers ask all ranks, and a short message takes none of their steps. ``left`` is the policy that
    this process has left before: it asks for the next one, also where others are in that one still.
    """

    key: int
    incarnation: int
    digest: str
    left: int = 0


@dataclass(frozen=True, slots=True)
class Welcome:
    """Coordinator to newcomer: it will be admitted between two rounds, and these are the scopes of the policy.

    ``members`` are those that take part now, each with its incarnation: they may take over, and others may not.
    ``between`` is the number that the policies of all islands have in common.
    """

    key: int
    policy: int
    to_members: int
    to_coordinator: int
    epoch: int
    members: tuple[tuple[int, int], ...]
    between: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Coordinator to newcomer: the running policy agrees in these values, which are others."""

    key: int
    values: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Over:
    """Answers a request: this rank waits to be admitted itself, or has left that policy (``has_ended``)."""

    key: int
    has_ended: bool


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """Answers a request: this rank is in several policies of that class and name, on the same ranks."""

    key: int
    count: int


AdmissionMessage: TypeAlias = Request | Welcome | Refusal | Over | Ambiguous


def key_of(ranks: Sequence[int], values: Mapping[str, str]) -> int:
    """Return a number for the policies of one class and name on these ranks, in a request and its answers."""
    return wire.scope_of(ranks, f"{values.get('class')} {values.get('name')}", 0)


def digest_of(ranks: Sequence[int], values: Mapping[str, str]) -> str:
    """Return a digest of what the members of a policy have agreed in."""
    return hashlib.sha256(repr((tuple(ranks), sorted(values.items()))).encode()).hexdigest()[:16]


class RequestBoard(Protocol):
    """Carries the requests of newcomers, and their answers."""

    def send(self, message: AdmissionMessage, dest: int) -> None:
        """Send a message, unless ``dest`` cannot be reached."""

    def end_application(self, application: Application) -> None:
        """Drop further answers to this application."""


class Application:
    """Asks for one newcomer, until it is admitted.

    Args:
        services: of this rank.
        board: Carries the requests.
        ranks: of the policy's group.
        values: what this rank's policy would agree in.
        timeout_s: how long it may take until a coordinator answers, and from each answer to the next one. To be
            admitted takes as long as the rounds do that come before.
        left: the policy of this class and name that this process has left before, or 0.
    """

    def __init__(
        self,
        services: Services,
        board: RequestBoard,
        ranks: Sequence[int],
        values: Mapping[str, str],
        timeout_s: float,
        *,
        left: int = 0,
    ) -> None:
        self.key = key_of(ranks, values)
        self._request = Request(self.key, services.incarnation, digest_of(ranks, values), left)
        self._values = values
        self._ranks = [rank for rank in ranks if rank != services.rank]
        self._services = services
        self._board = board
        self._timeout_s = timeout_s
        self._deadline = services.time() + timeout_s
        self._over: set[int] = set()
        self._have_left: set[int] = set()
        self._asked: set[int] = set()
        self._met: set[int] = set()
        self._began_at = self._ask_again_at = services.time()
        self._answer_s: float | None = None  # until the first one came
        self._welcome: tuple[Welcome, int] | None = None
        self._policy: int | None = None  # that has welcomed this rank
        self._error: AsyncdistError | None = None

    def _others(self) -> list[int]:
        return [rank for rank in self._ranks if rank not in self._services.gone]

    def on_message(self, message: AdmissionMessage, source: int) -> None:
        """Take an answer."""
        if self._answer_s is None:
            self._answer_s = self._services.time() - self._began_at
        match message:
            case Welcome() if self._policy in (None, message.policy):  # not of the one that the others start next
                self._welcome = message, source
                self._deadline = self._services.time() + self._timeout_s
            case Over(_, has_ended):
                self._over.add(source)
                if has_ended:
                    self._have_left.add(source)
            case Ambiguous(_, count):
                text = (
                    f"rank {source} is in {count} policies of this class and name, and cannot know which of them this "
                    "rank enters again; give each a name= of its own"
                )
                self._error = DisagreementError(text, difference="name")
            case Refusal(_, values):
                name, there = next(
                    (item for item in values if self._values.get(item[0]) != item[1]), ("group", "other")
                )
                mine = self._values.get(name)
                text = f"this rank's {name} is {mine}, that of the running policy is {there} (rank {source} says so)"
                self._error = DisagreementError(text, difference=name)
        self._services.engine.recheck()

    def note_round(self) -> None:
        """Note that this rank has been named in a round, which took its time: that is an answer too."""
        self._deadline = self._services.time() + self._timeout_s

    def close(self) -> None:
        """Take no answers any more."""
        self._board.end_application(self)

    async def welcomed(self) -> tuple[Welcome, int]:
        """Ask until a coordinator has answered, and return its answer and who it is.

        Raises:
            AsyncdistError: as :meth:`until`.
        """
        await self.until(lambda: False)
        welcome = self.take_welcome()
        assert welcome is not None, "an answer has come"
        return welcome

    def take_welcome(self) -> tuple[Welcome, int] | None:
        """Return the newest answer that was not taken yet, and who coordinates."""
        welcome, self._welcome = self._welcome, None
        if welcome is not None:
            self._policy = welcome[0].policy
        return welcome

    def _ask(self) -> None:
        """Ask all ranks when it is time to, and those at once that are there since."""
        now, others = self._services.time(), self._others()
        if now >= self._ask_again_at:
            waited_s = now - self._began_at if self._answer_s is None else 2 * self._answer_s
            self._ask_again_at = now + max(_ASK_AGAIN_S, min(waited_s, self._timeout_s / 2))
            self._asked.clear()
            self._over.clear()
            self._have_left.clear()
        self._asked.intersection_update(others)
        self._over.intersection_update(others)
        self._have_left.intersection_update(others)
        for rank in others:
            if rank not in self._asked:
                self._asked.add(rank)
                self._board.send(self._request, rank)

    async def until(self, is_over: Callable[[], bool]) -> None:
        """Ask until ``is_over``, or until an answer has come.

        Raises:
            DisagreementError: class, name, model or an option differs, or several policies have this class and name.
            LateError: all others have left the world; or the policy, and have begun no other one until the time is up.
            ClosedError: all others were started again, too.
            StartTimeoutError: the time is up.
            RankLostError: no other rank is there any more.
        """
        services = self._services
        while not is_over() and self._welcome is None:
            self._ask()

            def has_news() -> bool:
                is_answered = self._welcome is not None or self._error is not None
                return is_answered or is_over() or not self._asked.issuperset(self._others())

            until = min(self._ask_again_at, self._deadline)
            await services.engine.until(has_news, WaitId(WaitKind.POLICY_ADMISSION), deadline=until)
            if self._error is not None:
                raise self._error
            if is_over() or self._welcome is not None:
                return
            self._met |= {rank for rank in self._ranks if not services.is_unmet(rank)} | services.left_world()
            is_time_up = services.time() >= self._deadline
            # A rank that was not met yet may have the policy: a slow one is met late. One met just now was not asked.
            others = self._others()
            are_over = self._over.issuperset(others)
            is_over_everywhere = are_over and self._met.issuperset(self._ranks)
            if self._policy is None and self._have_left.intersection(others):
                is_over_everywhere = False  # they may enter the next one
            if not (is_over_everywhere or is_time_up):
                continue
            if are_over and (self._have_left or services.left_world().intersection(self._ranks)):
                raise LateError("no other rank has this policy any more: this rank was started again too late")
            if is_over_everywhere or (are_over and others):
                raise ClosedError("no other rank has this policy any more: all are lost, or were started again, too")
            if not others:
                raise RankLostError("no other rank of this policy is there: all are lost", rank=self._ranks[0])
            raise StartTimeoutError(
                f"no coordinator of this rank's policy has answered for {self._timeout_s:g} s: it is not admitted",
                missing=(),
            )
