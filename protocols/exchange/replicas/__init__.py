"""Replicas of several ranks in an exchange: each replica is judged as a whole, and its ranks act in the same steps."""
