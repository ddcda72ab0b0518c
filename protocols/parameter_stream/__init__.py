"""Carries the donors' snapshots into one replacer's accumulator: the parameter-stream protocol.

The replacer asks (:class:`asyncdist.messaging.streams.Grant`, with the round in the frame's header) and names the bytes
that it expects: the averaged tensors, or those and the exact ones. The donor answers with these bytes or with the
abort. Tensors travel as they are stored, dtype after dtype as in the flat state, each cut into chunks of its own.

It asks as soon as it knows the donors: a grant waits at its donor for the snapshot, which leaves in the step that takes
it. Nothing is added before the round is frozen, so no more comes than the window holds; if it is frozen without some
donor, all is asked for anew. A round takes 4.8 steps of each rank, and 5.8 where the replacer asks when it is frozen
(eight ranks, a report in each step).

All chunks of an exchange, donor after donor, pass through one window of ``WINDOW_COUNT`` pages of ``CHUNK_NBYTES``
each, and are added in that order. So a replacer holds one accumulator and one window, for any number of donors, and a
donor one snapshot. The first donor's chunks land in the accumulator itself, where its dtype is the stored one.

Small states share a page, so many donors may be under way at once. Of large ones the next donor is asked while the
last chunks of the one before it are under way.

On the sharded route (:mod:`protocols.selective.roles.reducer`) receivers ask for one part of a snapshot, or for the
mean of one part, by :class:`PartGrant`. A reducer sends what is made of a mean while the rest is to come.
"""
