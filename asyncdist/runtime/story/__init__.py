"""Reports what a rank waits for: on a signal, on requests over a socket, and if no rank makes progress."""
