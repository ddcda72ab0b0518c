"""Islands: groups of ranks with separate policies. The best ranks of an island become donors in other islands."""
