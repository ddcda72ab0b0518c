"""Streams model weights: a *replacer* requests and averages weight snapshots of other ranks, its *donors*.

The replacer sends each donor a :class:`asyncdist.messaging.streams.Grant`. The donor answers with the chunks of its
snapshot, or with an abort. Chunks from all donors are received into one window of ``WINDOW_COUNT`` pages of
``CHUNK_NBYTES`` each, and are added in donor order. A replacer therefore needs memory for only one accumulator and one
window, regardless of the number of donors. Chunks of small models share pages, so that many donors can send
concurrently.

On the sharded route (:mod:`protocols.selective.roles.reducer`), receivers use :class:`PartGrant` to request one part of
a snapshot, or the mean of one part.
"""
