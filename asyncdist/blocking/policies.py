"""Lets code without an event loop use a policy."""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Generic, NoReturn, Protocol, Self, TypeVar

from asyncdist.blocking.callers import Caller, current_caller, entered, find_caller, is_in_a_rank
from asyncdist.blocking.world import World, open_world
from asyncdist.errors import LocalProtocolError

InfoT = TypeVar("InfoT")
InfoT_co = TypeVar("InfoT_co", covariant=True)
ReportT = TypeVar("ReportT")
ReportT_co = TypeVar("ReportT_co", covariant=True)
PolicyT_co = TypeVar("PolicyT_co", bound="_Awaited[Any]", covariant=True)


class _Awaited(Protocol[InfoT_co]):
    """Is a policy: ``step`` in an asynchronous context."""

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, kind: Any, error: Any, trace: Any, /) -> Any: ...

    def step(
        self, local_metric: Any = None, /, *, loss: Any = None, score: Any = None
    ) -> Coroutine[Any, Any, InfoT_co]: ...


class _ReportingPolicy(_Awaited[Any], Protocol[ReportT_co]):
    """Is a policy that reports on itself."""

    def statistics(self) -> ReportT_co: ...


class Policy(Generic[PolicyT_co]):
    """Lets code without an event loop use a policy, as a context: ``with ad.blocking.policy(...) as policy``.

    Weights change only inside ``step``, on the caller's thread. Attributes and methods that do not block are those of
    the policy itself. Outside of a world it opens one, and ends it with the block.

    Args:
        awaited: a policy that has not been entered.
    """

    def __init__(self, awaited: PolicyT_co) -> None:
        self.awaited = awaited
        self._caller: Caller | None = None
        self._exits = ExitStack()

    def __repr__(self) -> str:
        return f"<{repr(self.awaited).strip('<>')}, blocking>"

    def __enter__(self) -> Self:
        """Start, together with all members.

        Raises:
            LocalProtocolError: a coroutine of a rank calls.
            BaseException: as the policy does.
        """
        if is_in_a_rank():
            kind = type(self.awaited).__name__
            raise LocalProtocolError(
                f"asyncdist.blocking.policy blocks, and this is a coroutine: write async with {kind}(...) as policy "
                "here, and await its step"
            )
        with ExitStack() as exits:
            if find_caller() is None:
                exits.enter_context(open_world())
            caller = current_caller("policy")
            exits.enter_context(entered(self.awaited, caller))
            self._caller, self._exits = caller, exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.__exit__(kind, error, trace)

    @property
    def world(self) -> World:
        """The world that it runs in."""
        return World(self._caller or self._refuse())

    def step(self: Policy[_Awaited[InfoT]], local_metric: Any = None, *, loss: Any = None, score: Any = None) -> InfoT:
        """Make progress, and change the model's weights if it is time; see :meth:`protocols.SpawnPolicy.step`.

        Raises:
            RuntimeError: outside of the block.
        """
        caller = self._caller or self._refuse()
        if loss is None and score is None:
            return caller.call(self.awaited.step, local_metric)
        return caller.call(self.awaited.step, local_metric, loss=loss, score=score)

    def statistics(self: Policy[_ReportingPolicy[ReportT]]) -> ReportT:
        """Return what this member has done so far, as the policy does."""
        return self.awaited.statistics()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do a ``step`` as torchgfn's policies do; see :meth:`protocols.ported.Ported.__call__`."""
        called: Any = self.awaited
        return (self._caller or self._refuse()).call(called, *args, **kwargs)

    def _refuse(self) -> NoReturn:
        raise RuntimeError(f"this {type(self.awaited).__name__} is used in its block: with ... as policy")

    def __getattr__(self, name: str) -> Any:
        if name == "awaited":  # not set yet
            raise AttributeError(name)
        return getattr(self.awaited, name)


#: The name by which it is made: ``ad.blocking.policy(AsyncSelectiveAveragingPolicy(...))``.
policy = Policy
