cimport cython
from libc.math cimport cos, exp, log, sin, sqrt


cdef class LogNormalSampler:
    cdef double _median
    cdef double _sigma
    cdef object _rng
    cdef object _uniform

    @cython.locals(angle=double, radius=double, z=double)
    cpdef double draw(self) except -1
