"""Operations that a group of ranks enters together: agreements, collectives, reductions, versioned windows."""
