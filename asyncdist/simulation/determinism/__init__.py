"""Keeps a simulated program deterministic: clocks, randomness, sets, generators, and access to the outside world."""
