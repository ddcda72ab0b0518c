"""Islands: a population is divided into groups with separate policies, whose best ranks are donors in other groups."""
