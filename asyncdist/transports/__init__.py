"""Transports: one contract (:mod:`asyncdist.transports.base`) and one module per backend."""
