cimport cython

from asyncdist.messaging.flow_control cimport Lane
from asyncdist.messaging.polling cimport Pollable
from asyncdist.transports.persistent_send cimport PersistentSend
from asyncdist.messaging.wire cimport Codec, FrameReader, FrameBuffer, FrameWriter


cdef Py_ssize_t DELIVERY_COUNT_MAX


cdef class _Prepared:
    cdef Py_ssize_t kind
    cdef Py_ssize_t dest
    cdef Py_ssize_t payload_nbytes
    cdef FrameBuffer buffer
    cdef PersistentSend send


cdef class Outbox:
    cdef Codec _codec
    cdef readonly object routes
    cdef list _writers
    cdef dict _prepared
    cdef _Prepared _last
    cdef object _engine
    cdef object _transport
    cdef bint _prepares
    cdef object _tag
    cdef object _name
    cdef object _contacts
    cdef object _left
    cdef object _flow
    cdef Lane _lane
    cdef public object strangers
    cdef object _dest
    cdef public unsigned long long sequence
    cdef readonly Py_ssize_t sent_count
    cdef public bint is_closed

    @cython.locals(kind=Py_ssize_t, payload=bytes, rank=Py_ssize_t, last=_Prepared, lane=Lane)
    cpdef object post(self, object message, object dest, object round)
    cdef _Prepared _prepare(self, Py_ssize_t kind, Py_ssize_t dest, Py_ssize_t payload_nbytes)
    @cython.locals(writer=FrameWriter)
    cdef object _frame(self, Py_ssize_t kind, bytes payload, object round)


cdef class Inbox:
    cdef FrameReceiver _receiver
    cdef object _name
    cdef object _tag
    cdef Py_ssize_t _capacity
    cdef object _overflow
    cdef object _fail
    cdef bint _counts_contacts
    cdef public object handler
    cdef public object on_first
    cdef readonly object mailbox
    cdef readonly list waiters
    cdef readonly Py_ssize_t received_count
    cdef public object failure
    cdef public bint is_closed
    cdef dict _last_sequence
    cdef Py_ssize_t _source
    cdef unsigned long long _sequence

    @cython.locals(rank=Py_ssize_t)
    cpdef bint deliver(self, object decode, FrameReader frame, object source) except -1
    cdef bint _fill(self, object envelope) except -1
    cpdef object take(self, Py_ssize_t test_count)
    cpdef list take_all(self)
    cpdef void wake_one(self)


cdef class FrameReceiver(Pollable):
    cdef readonly object request
    cdef FrameReader _frame
    cdef readonly object drop
    cdef object _on_unrouted
    cdef readonly object engine
    cdef public object contacts
    cdef readonly dict routes
    cdef unsigned long long _key
    cdef unsigned long long _stamp
    cdef Inbox _inbox
    cdef object _decode
    cdef readonly object stalled_on
    cdef object _flow
    cdef Py_ssize_t _credit_count
    cdef Lane _lane
    cdef readonly bint is_posted
    cdef readonly Py_ssize_t received_late_count

    cpdef Py_ssize_t poll(self) except -1
    @cython.locals(delivered=Py_ssize_t, arrival=tuple)
    cdef Py_ssize_t deliver_up_to(self, Py_ssize_t count_max) except -1
    @cython.locals(lane=Lane)
    cdef int _count(self, Py_ssize_t source, object flow) except -1
    @cython.locals(found=tuple, decode=object, inbox=Inbox)
    cpdef bint deliver(self, FrameReader frame, Py_ssize_t nbytes, object source) except -1
    cpdef resume(self, object full)
