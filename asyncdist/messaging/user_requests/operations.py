"""Adapts requests of the user's program to the interface of the engine's requests.

- :class:`MpiOperation` calls ``test`` of an ``mpi4py.MPI.Request``. MPI_Request_get_status, which should leave the
  request unchanged, is not used. In Open MPI 5 it does not detect the death of a peer, and in MPICH 5 it makes
  persistent requests inactive.
- :class:`WorkOperation` calls ``is_completed`` of a ``torch.distributed.Work``. It then calls ``wait`` once, which
  raises the work's error and orders the device's stream after the work. Works of gloo's ``isend`` and ``irecv``
  complete only inside ``wait`` (pytorch#30723), which a thread calls.
- :class:`EventOperation` calls ``query`` of a device event.

This module imports neither mpi4py nor torch. A program that has their requests has imported them.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

from asyncdist import validation
from asyncdist.errors import LocalProtocolError
from asyncdist.waits import WaitId, WaitKind

_AN_MPI_REQUEST: Final = WaitId(WaitKind.USER_REQUEST, name="an MPI request")
_A_WORK: Final = WaitId(WaitKind.USER_REQUEST, name="a work of torch.distributed")
#: Number of tests of an MPI request before its task yields to the event loop. They take about 10 us, longer than most
#: message exchanges with a rank that is already waiting. An iteration of the loop takes 1 to 2 us.
HOT_TEST_COUNT: Final = 40
#: Source and tag of a status that MPI has not filled in.
_UNSET: Final = -77
_ALLOWED: Final = (
    "an mpi4py.MPI.Request, a torch.distributed.Work, an event with the method query(), or a list of these"
)


def operation_of(request: object, status: object, ring: Callable[[], None]) -> Operation:
    """Return the operation for a request of the user's program.

    Args:
        status: Status object to fill, or None.
        ring: Function that a thread calls when the request has completed.

    Raises:
        TypeError: ``request`` is of another type, or cannot fill ``status``.
        LocalProtocolError: ``request`` belongs to asyncdist, or can never complete.
    """
    operation = _adapt(request, ring)
    operation.check_status(status)
    return operation


def _adapt(request: object, ring: Callable[[], None]) -> Operation:
    if is_mpi_request(request):
        return MpiOperation(request)
    work_type = getattr(sys.modules.get("torch.distributed"), "Work", None)
    if work_type is not None and isinstance(request, work_type):
        return WorkOperation(request, ring)
    if type(request).__module__.startswith("asyncdist."):
        raise LocalProtocolError(
            f"this {type(request).__name__} belongs to asyncdist, which completes it: await the method that started "
            "it, for example channel.send or world.send_stream"
        )
    if callable(getattr(request, "query", None)) and not isinstance(request, type):
        return EventOperation(request)
    if inspect.isawaitable(request):
        raise TypeError(f"request must be {_ALLOWED}; await this {type(request).__name__} directly")
    return validation.refuse("request", request, _ALLOWED, TypeError)


def is_mpi_request(request: object) -> bool:
    """Return whether ``request`` is an ``mpi4py.MPI.Request``."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and isinstance(request, mpi.Request)


class Operation:
    """A request of the user's program, with the methods that the engine calls.

    Attributes:
        what: Description of the request for reports.
        rings: Whether a thread notifies the event loop when the request completes.
        value: Result of the completed request.
        error: Exception with which the request has failed, or None.
    """

    cancelled: Final = False
    source: Final = -1
    nbytes: Final = 0

    def __init__(self, what: WaitId, *, rings: bool = False) -> None:
        self.what = what
        self.rings = rings
        self.value: Any = None
        self.error: BaseException | None = None

    def test(self) -> bool:
        """Return whether the request has completed or failed. Does not wait."""
        raise NotImplementedError

    def test_first(self) -> bool:
        """Test a new request, if necessary several times, before its task yields to the event loop."""
        return self.test()

    def keep_status(self) -> None:
        """Store the status of the completed request, because a later wait may ask for it."""

    def cancel(self) -> None:
        """Do nothing, because only the program cancels its requests."""

    def is_outdated(self) -> bool:
        """Return whether the program has started the request again, or recorded the event again, since it completed."""
        return False

    def check_status(self, status: Any) -> None:
        """Raise TypeError if ``status`` cannot be filled by this request."""
        if status is not None:
            raise TypeError(f"status must be None for {self.what}, which has no status, got {status!r}")

    def result(self, status: Any) -> Any:
        """Return the result of the completed request and fill ``status``, or raise the request's error."""
        if self.error is not None:
            raise self.error
        if status is not None:
            self._fill(status)
        return self.value

    def _fill(self, status: Any) -> None: ...


class MpiOperation(Operation):
    """Tests an MPI request.

    Raises:
        LocalProtocolError: The request is MPI.REQUEST_NULL, or an inactive persistent request.
    """

    def __init__(self, request: Any) -> None:
        super().__init__(_AN_MPI_REQUEST)
        self._mpi = sys.modules["mpi4py.MPI"]
        self._request = request
        self._is_persistent = isinstance(request, self._mpi.Prequest)
        self._status = self._new_status() if self._is_persistent else None
        self._has_been_active = False
        if not request:
            raise LocalProtocolError(
                "this MPI request is MPI.REQUEST_NULL: it was freed, or an earlier wait or test has completed it; wait "
                "for each request once"
            )

    def _new_status(self) -> Any:
        status = self._mpi.Status()
        status.source = status.tag = _UNSET
        return status

    def keep_status(self) -> None:
        if self._status is None:
            self._status = self._new_status()

    def test_first(self) -> bool:
        if self._is_persistent:
            return self.test()
        test, status = self._request.test, self._status
        try:
            for _ in range(HOT_TEST_COUNT):
                is_complete, value = test(status)
                if is_complete:
                    self.value = value
                    return True
        except Exception as error:
            self.error = error
            return True
        return False

    def test(self) -> bool:
        if not self._request:
            self.error = LocalProtocolError(
                "another call has completed or freed this MPI request while a task waited for it: do not call methods "
                "of a request from the first wait for it until a wait has returned"
            )
            return True
        try:
            is_complete, self.value = self._request.test(self._status)
        except Exception as error:
            self.error = error
            return True
        if not is_complete:
            self._has_been_active = True
        elif self._is_persistent and not self._has_been_active and self._is_inactive(self._status):
            self.error = LocalProtocolError(
                "this persistent MPI request is inactive: call Start() before each wait for it; on MPICH, requests of "
                "MPI.PROC_NULL always look inactive, so do not wait for them"
            )
        return bool(is_complete)

    def _is_inactive(self, status: Any) -> bool:
        """Return whether ``status`` is empty, as MPI leaves it for an inactive request (MPI-4.1 section 3.7.3)."""
        return bool(status.source == self._mpi.ANY_SOURCE and status.tag == self._mpi.ANY_TAG)

    def is_outdated(self) -> bool:
        if not self._is_persistent:
            return False
        status = self._new_status()
        is_complete, _ = self._request.test(status)
        if is_complete and not self._is_inactive(status):
            self._status = status  # The request was started again, and has completed again.
            return False
        return not is_complete

    def check_status(self, status: Any) -> None:
        if status is not None and not isinstance(status, self._mpi.Status):
            validation.refuse("status", status, "an mpi4py.MPI.Status or None", TypeError)
        if status is not None:
            self.keep_status()

    def _fill(self, status: Any) -> None:
        status.__setstate__(self._status.__getstate__())


class WorkOperation(Operation):
    """Tests a ``torch.distributed.Work``. A work that completes only inside ``wait`` gets a thread of its own."""

    def __init__(self, work: Any, ring: Callable[[], None]) -> None:
        is_polled = not _completes_in_wait(work)
        # After a gloo send or receive has completed, a second wait for it would never return.
        has_ended = not is_polled and work.is_completed()
        super().__init__(_A_WORK, rings=not is_polled and not has_ended)
        self._work = work
        self._ring = ring
        self._is_polled = is_polled
        self._has_ended = has_ended
        if self.rings:
            threading.Thread(target=self._run, name="asyncdist-work", daemon=True).start()

    def test(self) -> bool:
        if self._is_polled and not self._has_ended and self._work.is_completed():
            self._wait()
        return self._has_ended

    def _wait(self) -> None:
        try:
            self._work.wait()
        except Exception as error:
            self.error = error
        self._has_ended = True

    def _run(self) -> None:
        self._wait()
        self._ring()


def _completes_in_wait(work: Any) -> bool:
    """Return whether ``work`` completes only inside ``wait``. Such works have no future."""
    try:
        work.get_future()
    except RuntimeError:
        return True
    return False


class EventOperation(Operation):
    """Tests a device event, such as a ``torch.cuda.Event``."""

    def __init__(self, event: Any) -> None:
        super().__init__(WaitId(WaitKind.USER_REQUEST, name=f"an event ({type(event).__name__})"))
        self._event = event

    def test(self) -> bool:
        try:
            return bool(self._event.query())
        except Exception as error:
            self.error = error
            return True

    def is_outdated(self) -> bool:
        return not self.test()
