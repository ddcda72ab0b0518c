cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize


cdef packed struct _Packed:  # as the format in trace.py says, on a little-endian machine
    double time_s
    unsigned char code
    int a
    int b
    int tag
    long long nbytes


cdef inline bytes _pack(double time_s, unsigned char code, int a, int b, int tag, long long nbytes):
    cdef _Packed event
    event.time_s = time_s
    event.code = code
    event.a = a
    event.b = b
    event.tag = tag
    event.nbytes = nbytes
    return PyBytes_FromStringAndSize(<char *> &event, sizeof(_Packed))



cdef class Trace:
    cdef bint _has_ended
    cdef object _hash
    cdef bytearray _pending
    cdef object _contents_hash
    cdef bytearray _contents
    cdef object _flushed

    @cython.locals(contents=bytearray)
    cpdef object add_content(self, object data)

    @cython.locals(pending=bytearray)
    cpdef object add(self, double time_s, object kind, object a, object b, object tag, object nbytes)
