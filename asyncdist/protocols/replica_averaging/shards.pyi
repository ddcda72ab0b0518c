from protocols.replica_averaging.shards import *
