"""Algorithms of collectives: by messages, in pieces, in rank order, through shared memory."""
