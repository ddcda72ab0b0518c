"""Operations of a group of ranks: agreements, collectives such as all-reduce, and memory that other ranks read."""
