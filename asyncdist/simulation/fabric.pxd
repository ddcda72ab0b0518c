cimport cython

from asyncdist.simulation.arrivals cimport ArrivalQueue, Message
from asyncdist.simulation.message_faults cimport MessageFaults
from asyncdist.simulation.trace cimport Trace
from asyncdist.simulation.scheduler cimport Scheduler
from asyncdist.simulation.rank_turns cimport Turns


cdef class Receive:
    cdef Fabric _fabric
    cdef object buffer
    cdef Py_ssize_t dest
    cdef readonly Py_ssize_t wanted
    cdef object tag
    cdef readonly Py_ssize_t source
    cdef readonly Py_ssize_t nbytes
    cdef bint done
    cdef bint matched
    cdef readonly bint cancelled
    cdef public object error

    cpdef bint test(self) except -1
    cpdef object take(self)
    cpdef object start(self)
    cdef object fill(self, object data)


cdef class LateReceive(Receive):
    cdef bytes _data

    cdef bint _write(self) except -1


cdef class _Path:
    cdef object draw_latency_s
    cdef double bandwidth
    cdef bint is_shared
    cdef double free_at
    cdef dict last_arrival
    cdef dict last_entry


cdef class Fabric:
    cdef readonly Py_ssize_t size
    cdef readonly object network
    cdef Scheduler _scheduler
    cdef object _rng
    cdef Trace _trace
    cdef MessageFaults _faults
    cdef Py_ssize_t _eager_nbytes
    cdef bint _is_pushed
    cdef list _paths
    cdef list _posted
    cdef list _unexpected
    cdef list _doorbells
    cdef list _known_lost
    cdef set _dead
    cdef dict _died_at
    cdef readonly object job_nonce
    cdef readonly object collective_checker
    cdef readonly object shared
    cdef readonly Py_ssize_t message_count
    cdef readonly Py_ssize_t byte_count
    cdef bint _muted
    cdef object _all_ranks
    cdef bint _has_message_faults
    cdef bint _has_link_faults
    cdef readonly bint has_restarts
    cdef readonly object liveness
    cdef list _turns
    cdef bint _has_interfaces
    cdef object _interfaces
    cdef object _take_in
    cdef object _take_whole
    cdef object _begin
    cdef object _travel
    cdef object _finish

    @cython.locals(nbytes=Py_ssize_t, message=Message, delay=double, arrival=double, scheduler=Scheduler)
    cpdef Message send(self, object buffer, Py_ssize_t source, Py_ssize_t dest, object tag)
    @cython.locals(path=_Path)
    cdef _Path _path(self, Py_ssize_t source, Py_ssize_t dest)
    @cython.locals(now=double, transfer=double, factor=double, begins_at=double, arrival=double)
    cdef double _carry(
        self, _Path path, Py_ssize_t source, Py_ssize_t dest, Py_ssize_t nbytes, double latency
    ) except -1
    @cython.locals(path=_Path, nbytes=Py_ssize_t, done_at=double, last=double)
    cpdef object _enter(self, Message message)
    cpdef object _enter_whole(self, object receive, Message message)
    @cython.locals(path=_Path, nbytes=Py_ssize_t, arrival=double, last=double)
    cdef double _arrival(self, Message message, double delay) except -1
    @cython.locals(unexpected=dict, inbox=ArrivalQueue)
    cdef object _keep(self, Message message)
    @cython.locals(receive=Receive)
    cpdef object _arrive(self, Message message)
    @cython.locals(message=Message, waiting=ArrivalQueue)
    cpdef object post(self, Receive receive)
    cpdef object _rendezvous(self, Receive receive, Message message)
    @cython.locals(path=_Path, complete_at=double)
    cpdef object _transfer(self, Receive receive, Message message)
    cpdef object _arrive_whole(self, Receive receive, Message message)
    cdef bint _is_held(self, Message message) except -1
    cpdef object fail_send(self, Message message)
    cpdef object _complete(self, Receive receive, Message message, bint is_running=*)
    cpdef object withdraw(self, Receive receive)
    cdef object _ring(self, Py_ssize_t rank)
