"""Shows a population while it trains."""
