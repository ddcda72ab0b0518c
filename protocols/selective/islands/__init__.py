"""Divides a population into islands, each a policy of its own, and lets the best rank of one give to another."""
