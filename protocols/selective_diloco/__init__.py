"""Implements DiLoCo whose outer step uses only the differences that improve a held-out metric."""
