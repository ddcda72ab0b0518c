cimport cython


cdef class Message:
    cdef public object data
    cdef readonly Py_ssize_t nbytes
    cdef readonly Py_ssize_t source
    cdef readonly Py_ssize_t dest
    cdef readonly object tag
    cdef readonly bint eager
    cdef readonly bint done
    cdef readonly double left_at
    cdef readonly object source_incarnation
    cdef readonly object dest_incarnation
    cdef public object error

    cpdef bint test(self) except -1


cdef class ArrivalQueue:
    cdef dict _by_source
    cdef list _sources

    cdef bint is_empty(self) except -1
    cdef object add(self, Message message)
    @cython.locals(sources=list, position=Py_ssize_t, message=Message)
    cdef Message take(self, Py_ssize_t wanted, object rng)
