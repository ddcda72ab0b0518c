"""Supports replicas of several ranks in an exchange. A replica contributes as a whole, and its ranks act together."""
