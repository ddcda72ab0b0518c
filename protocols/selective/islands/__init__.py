"""Divides a population into islands, each with its own policy; the best rank of one gives weights to another."""
