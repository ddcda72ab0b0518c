"""Keeps a simulated program deterministic: clocks, randomness, sets, generators, and what it may touch outside."""
