from protocols.replica_averaging import *
