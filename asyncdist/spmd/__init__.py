"""Meshes, trees over ranks and named axes."""
