from protocols.selective.islands.migration import *
