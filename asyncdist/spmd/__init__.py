"""Offers meshes, trees over ranks and named axes."""
