"""Carries out what a member does in a round: it reports its metric, gives its weights, or takes the average."""
