"""Reports what a rank is doing: on a signal, on requests over its socket, and automatically if nothing moves."""
