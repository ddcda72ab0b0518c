"""Streams of model weights: a replacer requests the snapshots of several donors and adds them up as they arrive.

The replacer sends each donor a :class:`asyncdist.messaging.streams.Grant`, a request with the round and the expected
number of bytes. The donor answers with the chunks of its tensors in their stored dtypes, or with an abort. A request
waits at its donor until the snapshot exists, and the snapshot is sent in the step that takes it. If a round is frozen
without one of its donors, the replacer repeats all requests.

Chunks from all donors pass through one window of ``WINDOW_COUNT`` pages of ``CHUNK_NBYTES`` each, and are added in
donor order. A replacer therefore needs memory for one accumulator and one window, for any number of donors. The chunks
of small models share pages, so that many donors can send at the same time. For large models, the next donor's snapshot
is requested while the last chunks of the previous donor arrive.

On the sharded route (:mod:`protocols.selective.roles.reducer`), receivers use :class:`PartGrant` to request one part of
a snapshot, or the mean of one part. A reducer sends each chunk of a mean as soon as the chunk is complete.
"""
