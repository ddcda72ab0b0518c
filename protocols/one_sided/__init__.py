"""Selective averaging without a coordinator: each rank reads what others expose."""
