"""Algorithms of collectives: by messages, in pieces, in rank order, and through shared memory."""
