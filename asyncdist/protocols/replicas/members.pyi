from protocols.replicas.members import *
