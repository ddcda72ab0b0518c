cimport cython


cdef Py_ssize_t _BLOCK_NBYTES
cdef Py_ssize_t _CUT_NBYTES
cdef double _BLOCK_AGE_S
cdef Py_ssize_t _SAFE_POINT
cdef Py_ssize_t _SENT
cdef Py_ssize_t _STEP
cdef Py_ssize_t _POLICY
cdef Py_ssize_t _TOLD


cdef class RecordWriter:
    cdef object _options
    cdef object _clock
    cdef object _rank
    cdef object _file
    cdef object _process_id
    cdef bint _is_over
    cdef Py_ssize_t _nbytes
    cdef bytearray _block
    cdef double _block_began_at
    cdef bint _is_at_safe_point
    cdef Py_ssize_t _woken_count
    cdef Py_ssize_t _turn_count
    cdef bint _has_sent

    @cython.locals(block=bytearray, code=Py_ssize_t, begin=Py_ssize_t)
    cpdef object add(self, double time_s, object kind, tuple fields)
    cdef bint _is_block_due(self, double time_s) except -1
    cpdef object begin_safe_point(self, Py_ssize_t woken_count)
    cpdef object end_safe_point(self, Py_ssize_t turn_count)
    @cython.locals(block=bytearray, turn_count=Py_ssize_t)
    cdef object _add_safe_point(self, double time_s)
    cpdef object flush(self)
