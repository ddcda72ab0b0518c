cimport cython


cdef Py_ssize_t _LOOP_NBYTES_MAX
cdef unsigned int[::1] _REMAINDERS

cdef unsigned int _after_word(unsigned int crc) noexcept


cdef class FrameWriter:
    cdef bytearray _header
    cdef object _after_crc
    cdef unsigned int[::1] _words
    cdef unsigned long long[::1] _longs

    cpdef bytearray frame(self, unsigned int round, unsigned long long sequence, bytes payload)
    @cython.locals(crc="unsigned int", position=Py_ssize_t)
    cdef unsigned int _crc(self, bytes payload) except? 0


cdef class FrameReader:
    cdef object _view
    cdef unsigned char[::1] _bytes
    cdef unsigned int[::1] _words
    cdef unsigned long long[::1] _longs
    cdef readonly Py_ssize_t nbytes
    cdef object _after_crc
    cdef readonly object payload
    cdef readonly unsigned long long key
    cdef readonly unsigned long long stamp
    cdef readonly unsigned int round
    cdef readonly unsigned long long sequence

    @cython.locals(  # as wide as what they are shifted into
        kind="unsigned long long", nonce="unsigned long long", epoch="unsigned long long", scope="unsigned long long"
    )
    cpdef open(self, Py_ssize_t nbytes)
    @cython.locals(crc="unsigned int", position=Py_ssize_t)
    cdef unsigned int _crc(self) except? 0


cdef class Codec:
    cdef readonly tuple decoders
    cdef dict _by_type

    @cython.locals(entry=tuple, payload=bytes)
    cpdef tuple encode(self, object message)
