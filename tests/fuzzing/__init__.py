"""Damaged frames, damaged texts and untrue messages for everything that reads what other processes say."""
