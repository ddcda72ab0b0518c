cimport cython


cdef class SendRequest:
    cdef object _request
    cdef object _buffer
    cdef object _fail
    cdef object _peer


cdef class RepeatedSend:
    cdef object _request
    cdef object _start
    cdef object _test
    cdef bytearray _room
    cdef object _fail
    cdef object _peer
    cdef readonly bint is_free

    cpdef object send(self, object message)


cdef class SmallSends:
    cdef object _isend
    cdef object _prepare
    cdef object _fail
    cdef dict _repeated
    cdef RepeatedSend _last
    cdef object _dest
    cdef object _tag
    cdef Py_ssize_t _nbytes

    @cython.locals(key=tuple, repeated=RepeatedSend, last=RepeatedSend)
    cpdef object start(self, object buffer, object dest, object tag)


cdef class ReceiveRequest:
    cdef object _request
    cdef object _test
    cdef object _start
    cdef object _buffer
    cdef object _status
    cdef object _fail
    cdef object _peer
