cimport cython

from asyncdist.simulation.scheduler cimport Handle, Scheduler, Timer


@cython.locals(handle=Handle)
cdef Handle _new_handle(object callback, tuple args, object context)
@cython.locals(timer=Timer)
cdef Timer _new_timer(double when_s, object callback, tuple args, object context)


cdef class Turns:
    cdef readonly Py_ssize_t rank
    cdef readonly bint dead
    cdef public object on_exit
    cdef readonly double busy_s
    cdef public double slowness
    cdef readonly Scheduler _scheduler
    cdef object _before_turn
    cdef object _enter
    cdef object _background
    cdef list _ready
    cdef list _deferred
    cdef Handle _sleeper
    cdef bint _has_sleeper
    cdef bint _debug
    cdef bint _busy
    cdef double _stalled_s
    cdef Py_ssize_t _ready_count_before
    cdef bint _has_turn
    cdef bint _running
    cdef Py_ssize_t _turns_in_a_row
    cdef bint _has_free_safe_points
    cdef Py_ssize_t _read_count
    cdef object _take_turn
    cdef object _take_up
    cdef object _take_timer
    cdef object __weakref__

    cdef object _schedule(self)
    cdef double _next_turn_at(self) except -1
    @cython.locals(scheduler=Scheduler, when=double)
    cdef bint _continues(self) except -1
    cdef object _is_woken(self)
    cdef bint _is_silent(self) except -1
    cpdef object _turn(self)
    @cython.locals(ready=list, handle=Handle, done_count=Py_ssize_t)
    cdef object _run_ready(self)
    @cython.locals(scheduler=Scheduler)
    cdef object _call(self, Handle handle)
    cpdef object become_busy(self, double seconds)
    cpdef object block(self, double seconds)
    cpdef double unblock(self) except -1
    @cython.locals(scheduler=Scheduler)
    cdef object _become_busy(self, double seconds)
    cpdef object stall(self, double seconds)
    cpdef object call_when_idle(self, object action, tuple args)
    cpdef object _resume(self)
    cpdef object has_computed(self)
    cpdef object _fire(self, Timer timer)
