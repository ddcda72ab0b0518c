cimport cython


cdef class MessageFaults:
    cdef object _on_fired
    cdef object _on_kill
    cdef list _sent_counts
    cdef dict _pair_counts
    cdef dict _frame_counts
    cdef dict _kills
    cdef dict _delays
    cdef dict _corruptions
    cdef list _slow_links
    cdef list _partitions
    cdef readonly bint has_message_faults
    cdef readonly bint has_link_faults

    cdef tuple apply(self, Py_ssize_t source, Py_ssize_t dest, object tag, object data)
    @cython.locals(factor=double)
    cdef double link_factor(self, tuple pair, double now) except -1
