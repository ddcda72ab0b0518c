"""Implements DiLoCo with outer steps that use only the differences that improve a held-out metric."""
