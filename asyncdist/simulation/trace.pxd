cimport cython


cdef class Trace:
    cdef bint _has_ended
    cdef object _hash
    cdef bytearray _pending
    cdef object _flushed

    @cython.locals(pending=bytearray)
    cpdef object add(self, double time_s, object kind, object a, object b, object tag, object nbytes)
