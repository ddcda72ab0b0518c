cimport cython


cdef dict _tasks


cdef class LoopWork:
    cdef object _loop
    cdef object _ready
    cdef object _timers
    cdef tuple _tables
    cdef Py_ssize_t _own_count
    cdef set _spared
    cdef list _seen
    cdef list _deadlines
    cdef double _asked_at
    cdef double _ran_at
    cdef public bint is_running
    cdef public double spin_s
    cdef public double turn_period_s

    cpdef object spare(self, object descriptor)
    @cython.locals(now=double, away_s=double, is_spinning=bint)
    cpdef bint has_work(self, object spared) except -1
    @cython.locals(ready_count=Py_ssize_t, entry_count=Py_ssize_t)
    cdef bint _sees_work(self, double now, object spared) except -1
    cdef Py_ssize_t _timer_count(self) except -1
    @cython.locals(timers=list, position=Py_ssize_t)
    cdef bint _is_timer_due(self, double now, object spared) except -1
