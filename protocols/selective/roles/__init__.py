"""Implements a member's roles in a round: reporting its metric, sending its weights, and applying an average."""
