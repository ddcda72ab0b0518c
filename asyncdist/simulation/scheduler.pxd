cimport cython


cdef class Timer


cdef class Scheduler:
    cdef public double now
    cdef public double ahead_s
    cdef readonly Py_ssize_t event_count
    cdef public Py_ssize_t task_count
    cdef public Py_ssize_t idle_turn_count
    cdef public Py_ssize_t user_rank
    cdef public bint stopped
    cdef readonly object random
    cdef list _heap
    cdef list _now
    cdef Py_ssize_t _pushed_count
    cdef Py_ssize_t _collect_at
    cdef Py_ssize_t _cancelled_count
    cdef Py_ssize_t _count_at_now
    cdef double _until_s
    cdef object _after_event
    cdef object _running_loop

    @cython.locals(now=double)
    cpdef object at(self, double when, object action, tuple args=*)
    cdef object add_timer(self, double when, object fire, Timer timer)
    cdef object forget_timer(self)
    @cython.locals(heap=list, first=tuple)
    cdef double _next_when(self) except -1
    cpdef object soon(self, object action)
    cpdef double time(self) except -1
    cpdef bint run(self, double until_s=*, object after_event=*) except -1
    @cython.locals(until_s=double, soon=list, heap=list, first=tuple, args=tuple, when=double)
    cdef bint _run(self) except -1
    cdef object _collect(self)
    cdef bint _is_enough(self) except -1
    cdef object switch_loop(self, object loop)
    cdef bint go_on_until(self, double when) except -1


@cython.locals(timer=Timer)
cdef bint _is_cancelled(tuple args) except -1


cdef class Handle:
    cdef object callback
    cdef tuple args
    cdef object context
    cdef bint is_cancelled


cdef class Timer(Handle):
    cdef double when_s
    cdef Scheduler scheduler


@cython.locals(handle=Handle)
cdef Handle _new_handle(object callback, tuple args, object context)
@cython.locals(timer=Timer)
cdef Timer _new_timer(double when_s, object callback, tuple args, object context)


cdef class Turns:
    cdef readonly Py_ssize_t rank
    cdef readonly bint dead
    cdef readonly double deaf_s
    cdef public double slowness
    cdef readonly Scheduler _scheduler
    cdef object _before_turn
    cdef object _enter
    cdef object _background
    cdef list _ready
    cdef list _put_off
    cdef Handle _sleeper
    cdef bint _has_sleeper
    cdef bint _debug
    cdef bint _deaf
    cdef double _stalled_s
    cdef Py_ssize_t _heard_count
    cdef bint _has_turn
    cdef bint _running
    cdef Py_ssize_t _turns_in_a_row
    cdef Py_ssize_t _read_count
    cdef object _take_turn
    cdef object _take_up
    cdef object _take_timer
    cdef object __weakref__

    cdef object _schedule(self)
    cdef double _next_turn_at(self) except -1
    @cython.locals(scheduler=Scheduler, when=double)
    cdef bint _goes_on(self) except -1
    cdef object _is_woken(self)
    cdef bint _is_silent(self) except -1
    cpdef object _turn(self)
    @cython.locals(ready=list, handle=Handle, done_count=Py_ssize_t)
    cdef object _run_ready(self)
    @cython.locals(scheduler=Scheduler)
    cdef object _call(self, Handle handle)
    cpdef object fall_deaf(self, double seconds)
    cpdef object block(self, double seconds)
    cpdef double unblock(self) except -1
    @cython.locals(scheduler=Scheduler)
    cdef object _fall_deaf(self, double seconds)
    cpdef object stall(self, double seconds)
    cpdef object attend(self, object action, tuple args)
    cpdef object _resume(self)
    cpdef object has_computed(self)
    cpdef object _fire(self, Timer timer)
