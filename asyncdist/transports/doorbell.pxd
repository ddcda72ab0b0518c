cdef unsigned char _ABSENT
cdef unsigned char _AWAKE
cdef unsigned char _ASLEEP
cdef unsigned char _ENDED


cdef class PeerBell:
    cdef unsigned char[::1] _board
    cdef Py_ssize_t _place
    cdef object _pipe

    cpdef object ring_sleeper(self)
    cpdef object mute(self)
    cdef object _ring(self)


cdef class Doorbell:
    cdef object _offered
    cdef object _memory
    cdef unsigned char[::1] _board
    cdef Py_ssize_t _place
    cdef list _places
    cdef list _bells
    cdef bint _have_all_joined
    cdef list _descriptors
    cdef object _finalizer
    cdef Py_ssize_t _size
    cdef readonly object address
    cdef object __weakref__

    cpdef bint arm(self) except -1
    cpdef object disarm(self)
    cpdef object clear(self)
    cpdef bint is_rung_by_all(self) except -1
