cimport cython


cdef unsigned int _ONES
cdef Py_ssize_t _LOOP_NBYTES_MAX
cdef unsigned int[::1] _REMAINDERS

cdef unsigned int _after_word(unsigned int crc) noexcept
cdef unsigned int _after_long(unsigned int crc, unsigned long long value) noexcept
@cython.locals(crc="unsigned int", position=Py_ssize_t)
cdef unsigned int of_frame(unsigned long long[::1] longs, unsigned char[::1] octets, Py_ssize_t nbytes) except? 0
@cython.locals(crc="unsigned int", position=Py_ssize_t, nbytes=Py_ssize_t, word="unsigned int")
cdef unsigned int of_header_and_payload(unsigned int[::1] words, object after_crc, bytes payload) except? 0
