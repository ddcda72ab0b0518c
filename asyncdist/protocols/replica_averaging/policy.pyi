from protocols.replica_averaging.policy import *
