cimport cython

from asyncdist.transports.doorbell cimport PeerBell


cdef class PersistentSend:
    cdef object _request
    cdef PeerBell _bell
    cdef object _start
    cdef object _test
    cdef object _fail
    cdef object _peer
    cdef readonly bytearray buffer
    cdef readonly bint is_free

    @cython.locals(test_count=Py_ssize_t)
    cpdef object start(self)
