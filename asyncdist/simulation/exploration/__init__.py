"""Running many seeds, and finding the least fault plan that fails."""
