from protocols.replicas.policy import *
