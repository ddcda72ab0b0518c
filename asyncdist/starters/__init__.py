"""Scripts to start from, which ``asyncdist init`` copies; no module of asyncdist imports them."""
