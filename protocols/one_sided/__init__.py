"""Selective averaging without a coordinator: each rank reads the snapshots that other ranks publish."""
