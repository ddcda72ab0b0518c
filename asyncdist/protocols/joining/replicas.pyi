from protocols.joining.replicas import *
