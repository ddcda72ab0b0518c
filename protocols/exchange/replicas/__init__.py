"""Replicas of several ranks in an exchange: decisions on them as a whole, and the steps of their ranks together."""
