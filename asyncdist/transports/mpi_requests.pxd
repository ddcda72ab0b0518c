cdef class SendRequest:
    cdef object _request
    cdef object _buffer
    cdef object _fail
    cdef object _peer


cdef class RepeatedSend:
    cdef object _request
    cdef object _start
    cdef object _test
    cdef object _buffer
    cdef object _fail
    cdef object _peer
    cdef readonly bint is_free

    cpdef object start(self)


cdef class ReceiveRequest:
    cdef object _request
    cdef object _test
    cdef object _start
    cdef object _buffer
    cdef object _status
    cdef object _fail
    cdef object _peer
