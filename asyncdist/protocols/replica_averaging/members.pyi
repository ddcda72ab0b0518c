from protocols.replica_averaging.members import *
