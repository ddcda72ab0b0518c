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
    cdef Py_ssize_t _collect_every
    cdef Py_ssize_t _collect_at
    cdef Py_ssize_t _cancelled_count
    cdef Py_ssize_t _count_at_now
    cdef double _until_s
    cdef object _after_event
    cdef object _running_loop
    cdef bint _freezes

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
    cdef bint advance_until(self, double when) except -1


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
