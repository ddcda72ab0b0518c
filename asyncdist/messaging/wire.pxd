cimport cython

from asyncdist.messaging cimport _crc32


cdef Py_ssize_t _HEADER_NBYTES
cdef Py_ssize_t _PAYLOAD_NBYTES_MAX
cdef Py_ssize_t _COPY_LOOP_NBYTES_MAX


cdef class FrameWriter:
    cdef bytearray _header
    cdef object _after_crc
    cdef unsigned int[::1] _words
    cdef unsigned long long[::1] _longs

    cpdef bytearray frame(self, unsigned int round, unsigned long long sequence, bytes payload)


cdef class FrameBuffer:
    cdef Py_ssize_t _nbytes
    cdef object _payload
    cdef unsigned int[::1] _route
    cdef unsigned char[::1] _octets
    cdef unsigned int[::1] _words
    cdef unsigned long long[::1] _longs

    @cython.locals(position=Py_ssize_t)
    cpdef write(self, unsigned int round, unsigned long long sequence, bytes payload)


cdef class FrameReader:
    cdef readonly object buffer
    cdef unsigned char[::1] _octets
    cdef unsigned int[::1] _words
    cdef unsigned long long[::1] _longs
    cdef readonly Py_ssize_t nbytes
    cdef readonly object payload
    cdef readonly unsigned long long key
    cdef readonly unsigned long long stamp
    cdef readonly unsigned int round
    cdef readonly unsigned long long sequence

    @cython.locals(  # as wide as the integers into which they are shifted
        kind="unsigned long long", nonce="unsigned long long", epoch="unsigned long long", scope="unsigned long long"
    )
    cpdef open(self, Py_ssize_t nbytes)


cdef class Codec:
    cdef readonly tuple decoders
    cdef readonly dict decoders_by_key
    cdef dict _by_type
    cdef object _last_type
    cdef object _kind
    cdef tuple _plain_fields
    cdef object _checked
    cdef object _last
    cdef tuple _last_encoded
    cdef bint _last_is_fixed

    @cython.locals(entry=tuple, payload=bytes)
    cpdef tuple encode(self, object message)
    @cython.locals(field=tuple)
    cdef bint _is_plain(self, object message) except -1
    cdef bint _is_like_checked(self, object message) except -1
