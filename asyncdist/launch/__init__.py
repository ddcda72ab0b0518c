"""Starts jobs with several ranks, and diagnoses installations (``asyncdist doctor``)."""
