"""The parameter-stream protocol: adds up the donors' snapshots in one replacer's accumulator.

The replacer sends each donor a :class:`asyncdist.messaging.streams.Grant` with the round and the expected number of
bytes: those of the averaged tensors, with or without the exact ones. The donor answers with these bytes or with an
abort. Tensors are sent in their stored dtypes, in the order of the flat state, and each is cut into chunks of its own.

The replacer asks as soon as it knows the donors. A grant waits at its donor for the snapshot, which is sent in the step
that takes it. Nothing is added before the round is frozen, so until then no more arrives than the window holds. If
the round is frozen without one of the donors, the replacer asks all donors again. A round takes 4.8 steps of each rank;
it would take 5.8 if the replacer asked only in the frozen round (eight ranks, a report in each step).

The chunks of all donors, in turn, pass through one window of ``WINDOW_COUNT`` pages of ``CHUNK_NBYTES`` each, and are
added in that order. A replacer therefore holds one accumulator and one window for any number of donors, and a donor
holds one snapshot. The first donor's chunks are received in the accumulator itself if it has the stored dtype.

Small states share a page, so many donors may send at once. For large states, the next donor is asked while the last
chunks of the previous donor are arriving.

On the sharded route (:mod:`protocols.selective.roles.reducer`), receivers use :class:`PartGrant` to ask for one part of
a snapshot, or for the mean of one part. A reducer sends each chunk of a mean as soon as it is complete.
"""
