from protocols.replicas import *
