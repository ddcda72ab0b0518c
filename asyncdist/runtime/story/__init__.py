"""Reports a rank's waits: on a signal, on request over a socket, and if no rank makes progress."""
