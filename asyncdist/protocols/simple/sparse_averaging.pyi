from protocols.simple.sparse_averaging import *
