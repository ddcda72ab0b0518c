from protocols.replicas.shards import *
