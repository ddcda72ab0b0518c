"""Looks into optimizers: what of a state is reset when weights are replaced, and what has to follow them."""
