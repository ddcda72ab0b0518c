"""Divides the ranks into islands: groups that average separately, but sometimes send weights to each other."""
