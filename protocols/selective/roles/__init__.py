"""Carries out a member's part in a round: it reports its metric, gives its weights, or takes the average."""
