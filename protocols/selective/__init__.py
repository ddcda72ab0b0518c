"""Asynchronous selective averaging: the worst ranks take the average of the good ones."""
