"""Operations of a group of ranks: agreements, collectives such as all-reduce, and versioned windows."""
