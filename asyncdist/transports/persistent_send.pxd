from asyncdist.transports.doorbell cimport PeerBell


cdef class PersistentSend:
    cdef object _request
    cdef PeerBell _bell
    cdef object _fail
    cdef object _peer
    cdef readonly bytearray buffer
    cdef readonly bint is_free

    cpdef object start(self)
    cpdef bint settle(self) except -1
