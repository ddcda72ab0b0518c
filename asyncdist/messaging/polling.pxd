cimport cython

from asyncdist.transports.doorbell cimport Doorbell
from asyncdist.transports.loop_work cimport LoopWork


cdef object _STOPPED
cdef object _PASSING
cdef object _HOT
cdef object _WARM
cdef object _IDLE
cdef object _ASLEEP


cdef class Pollable:
    cpdef Py_ssize_t poll(self) except -1


cdef class PendingRequest:
    cdef readonly object request
    cdef readonly object what
    cdef public object on_done
    cdef readonly object error
    cdef public bint disowned

    cpdef object finish(self, object error)


cdef class Poller:
    cdef readonly object transport
    cdef readonly object loop
    cdef readonly object failure
    cdef public LoopWork loop_work
    cdef tuple _pollables
    cdef readonly list _operations
    cdef readonly list _in_test
    cdef public bint _has_disowned
    cdef readonly dict _waiters
    cdef readonly dict _conditions
    cdef readonly bint _in_pass
    cdef Py_ssize_t _unused_result
    cdef bint _must_yield
    cdef readonly Py_ssize_t _pass_count
    cdef readonly Py_ssize_t _completion_count
    cdef readonly Py_ssize_t _request_count
    cdef double _transferred_at
    cdef object _handle
    cdef object _take_tick
    cdef Py_ssize_t _quiet_tick_count
    cdef double _quiet_since
    cdef double _tick_ended_at
    cdef bint _passed_since_tick
    cdef readonly object _state
    cdef object _context
    cdef bint _wakes
    cdef readonly bint _misses_wakes
    cdef bint _has_threads
    cdef Doorbell _bell
    cdef bint _has_spun
    cdef double _slept_at
    cdef Py_ssize_t _unspun_count
    cdef Py_ssize_t _unspun_count_max
    cdef object __weakref__

    @cython.locals(pollable=Pollable, completed=Py_ssize_t)
    cpdef Py_ssize_t poll(self) except -1
    @cython.locals(completed=Py_ssize_t)
    cpdef bint try_safe_point(self) except -1
    @cython.locals(completed=Py_ssize_t)
    cpdef Py_ssize_t first_pass(self) except -1
    @cython.locals(operations=list, pending=list, left=list, operation=PendingRequest, position=Py_ssize_t, completed=Py_ssize_t)
    cdef Py_ssize_t _test_operations(self) except -1
    cpdef object yield_core(self)
    @cython.locals(work=LoopWork)
    cpdef bint is_loop_idle(self) except -1
    cpdef object watch(self, object request, object what, object on_done=*)
    cpdef object recheck(self)
    cpdef object fail(self, object error)
    cpdef object abandon(self, object error)
    cpdef object ring(self)
    cpdef object wake(self)
    @cython.locals(began_at=double, alone=bint, pass_count=Py_ssize_t)
    cpdef object _tick(self)
    @cython.locals(completed=Py_ssize_t)
    cdef Py_ssize_t _poll_for_waiters(self, Py_ssize_t pass_count=*) except -1
    @cython.locals(quiet=Py_ssize_t, operation=PendingRequest)
    cdef object _next_tick(self, bint alone)
    @cython.locals(operation=PendingRequest)
    cdef bint _has_only_small_sends(self) except -1
    @cython.locals(bell=Doorbell)
    cdef object _sleep(self)
    cdef bint _is_rung_by_all(self) except -1


cpdef object resolve_waiter(object waiter, object error)
