cimport cython


cdef class LoopWork:
    cdef object _loop
    cdef object _ready
    cdef object _timers
    cdef tuple _tables
    cdef Py_ssize_t _own_count
    cdef double _asked_at
    cdef double _ran_at
    cdef public bint is_running
    cdef public double spin_s
    cdef public double turn_period_s

    @cython.locals(now=double, away_s=double, is_spinning=bint)
    cpdef bint has_work(self, object spared) except -1
    @cython.locals(ready_count=Py_ssize_t, entry_count=Py_ssize_t)
    cdef bint _sees_work(self, double now, object spared) except -1
