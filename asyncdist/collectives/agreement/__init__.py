"""Agreements: ranks compare their intentions before they start an operation together."""
