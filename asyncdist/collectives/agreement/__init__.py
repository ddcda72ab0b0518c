"""Lets ranks check that all of them are about to start the same operation."""
