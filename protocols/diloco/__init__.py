"""Implements DiLoCo and its family: ranks train alone, and an outer optimizer moves their common anchor each round."""
