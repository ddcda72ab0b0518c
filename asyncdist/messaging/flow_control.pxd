cdef class Lane:
    cdef readonly Py_ssize_t rank
    cdef public long long room
    cdef public object held
    cdef public Py_ssize_t uncredited
