"""Starts jobs and diagnoses them."""
