"""Wraps policies for code without an event loop."""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, Final, Generic, NoReturn, Protocol, Self, TypeVar

from asyncdist.blocking.callers import Caller, current_caller, entered, find_caller, is_in_a_rank
from asyncdist.blocking.world import World, open_world
from asyncdist.errors import LocalProtocolError

InfoT = TypeVar("InfoT")
InfoT_co = TypeVar("InfoT_co", covariant=True)
ReportT = TypeVar("ReportT")
ReportT_co = TypeVar("ReportT_co", covariant=True)
PolicyT_co = TypeVar("PolicyT_co", bound="_Awaited[Any]", covariant=True)


#: Attributes of a :class:`Policy` itself. All other attributes are the wrapped policy's.
_OWN: Final = ("awaited", "_caller", "_exits")


class _Awaited(Protocol[InfoT_co]):
    """Interface of a policy: an asynchronous context manager with a ``step`` method."""

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, kind: Any, error: Any, trace: Any, /) -> Any: ...

    def step(
        self, local_metric: Any = None, /, *, loss: Any = None, score: Any = None
    ) -> Coroutine[Any, Any, InfoT_co]: ...


class _ReportingPolicy(_Awaited[Any], Protocol[ReportT_co]):
    def statistics(self) -> ReportT_co: ...


class _SettlingPolicy(_Awaited[Any], Protocol):
    async def settle(self) -> None: ...


class _AnchoredPolicy(_Awaited[Any], Protocol):
    def anchor_weights(self) -> AbstractAsyncContextManager[None]: ...


class Policy(Generic[PolicyT_co]):
    """Wraps a policy for code without an event loop: ``with ad.blocking.policy(...) as policy``.

    Weights change only inside ``step``, on the caller's thread. The wrapped policy's attributes are also attributes of
    this object, and may be assigned: ``policy.optimizer = new``. If no world is open, the ``with`` block opens one and
    closes it at the end.

    Args:
        awaited: Policy that has not been entered, also available as the attribute ``awaited``.
    """

    def __init__(self, awaited: PolicyT_co) -> None:
        self.awaited = awaited
        self._caller: Caller | None = None
        self._exits = ExitStack()

    def __repr__(self) -> str:
        return f"<{repr(self.awaited).strip('<>')}, blocking>"

    def __enter__(self) -> Self:
        """Start the policy together with its other ranks.

        Raises:
            LocalProtocolError: Called in a rank's coroutine.
            BaseException: Any error that the policy's ``__aenter__`` raises.
        """
        if is_in_a_rank():
            kind = type(self.awaited).__name__
            raise LocalProtocolError(
                "asyncdist.blocking.policy cannot be used in a coroutine, because it blocks: write async with "
                f"{kind}(...) as policy, and await its step"
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
        """The world in which the policy runs."""
        return World(self._caller or self._refuse())

    def step(
        self: Policy[_Awaited[InfoT]],
        local_metric: Any = None,
        *,
        loss: Any = None,
        score: Any = None,
        tokens: float | None = None,
    ) -> InfoT:
        """Take a policy step, which may change the model's weights. See :meth:`protocols.SpawnPolicy.step`.

        Args:
            local_metric, loss, score: This rank's metric.
            tokens: Number of tokens or examples of this step, for :class:`protocols.DiLoCoPolicy`.

        Raises:
            RuntimeError: Called outside the ``with`` block.
        """
        caller = self._caller or self._refuse()
        if loss is None and score is None and tokens is None:
            return caller.call(self.awaited.step, local_metric)
        given = {"loss": loss, "score": score, **({} if tokens is None else {"tokens": tokens})}
        return caller.call(self.awaited.step, local_metric, **given)

    def settle(self: Policy[_SettlingPolicy]) -> None:
        """Wait for averaging rounds in progress, so that ``state_dict`` can be saved. See ``DiLoCoPolicy.settle``.

        Raises:
            RuntimeError: Called outside the ``with`` block.
        """
        (self._caller or self._refuse()).call(self.awaited.settle)

    def anchor_weights(self: Policy[_AnchoredPolicy]) -> AbstractContextManager[None]:
        """Put the last round's weights into the model during a ``with`` block. See ``DiLoCoPolicy.anchor_weights``.

        Raises:
            RuntimeError: Called outside the policy's ``with`` block.
        """
        return entered(self.awaited.anchor_weights(), self._caller or self._refuse())

    def statistics(self: Policy[_ReportingPolicy[ReportT]]) -> ReportT:
        """Return the policy's statistics on this rank."""
        return self.awaited.statistics()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take a policy step with torchgfn's arguments. See :meth:`protocols.ported.Ported.__call__`."""
        called: Any = self.awaited
        return (self._caller or self._refuse()).call(called, *args, **kwargs)

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            f"this {type(self.awaited).__name__} is not open; use it inside its with block: with "
            "asyncdist.blocking.policy(...) as policy"
        )

    def __getattr__(self, name: str) -> Any:
        if name == "awaited":  # getattr would recurse if the attribute is not set yet, as while unpickling
            raise AttributeError(name)
        return getattr(self.awaited, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(self.awaited, name, value)


#: Alias of :class:`Policy`, used as in ``ad.blocking.policy(AsyncSelectiveAveragingPolicy(...))``.
policy = Policy
