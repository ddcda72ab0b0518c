"""Implements what a member does in an averaging round: report its metric, send its weights, apply an average."""
