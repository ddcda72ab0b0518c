"""Asynchronous selective averaging: the worst ranks adopt the average of the best ranks."""
