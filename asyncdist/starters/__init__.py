"""Example scripts that ``asyncdist init`` copies. No module of asyncdist imports them."""
