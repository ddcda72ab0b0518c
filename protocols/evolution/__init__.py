"""Evolution strategies: training without gradients, in which ranks exchange only losses."""
