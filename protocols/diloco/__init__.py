"""DiLoCo and its family: ranks train alone, and an outer optimizer moves their common anchor once per round."""
