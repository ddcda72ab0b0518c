"""Draws the figures of a report."""
