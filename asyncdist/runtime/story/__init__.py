"""Tells what a rank does right now: to a signal, to who asks over its socket, and by itself when nothing moves."""
