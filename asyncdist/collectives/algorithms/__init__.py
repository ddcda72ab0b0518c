"""Algorithms of collectives: with messages, in pieces, in rank order, and through shared memory."""
