"""What happens on each rank: kept for reports, written to files, and read back."""
