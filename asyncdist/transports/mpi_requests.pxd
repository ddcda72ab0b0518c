from asyncdist.transports.doorbell cimport PeerBell


cdef class SendRequest:
    cdef PeerBell _bell
    cdef object _request
    cdef object _buffer
    cdef object _fail
    cdef object _peer


cdef class ReceiveRequest:
    cdef object _request
    cdef object _buffer
    cdef object _status
    cdef object _fail
    cdef object _peer


cdef class WildcardReceive(ReceiveRequest):
    cdef object _acknowledge
    cdef object _lost
