"""Inspects optimizers: which state is reset when weights are replaced, and which must follow the new weights."""
