"""Averages replicas that several ranks hold together: a replica is one member of a selective-averaging policy."""
