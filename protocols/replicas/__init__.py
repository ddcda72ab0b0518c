"""Selective averaging among replicas of several ranks each: a replica is one member of the policy."""
