"""Lays out a fragment of a model as flat vectors, copies values into them, and encodes them for sending."""
