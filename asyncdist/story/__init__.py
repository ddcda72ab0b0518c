"""Describes what each rank of a job is doing (its *story*), to explain why a job makes no progress."""
