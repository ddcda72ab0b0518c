from protocols.exchange.replicas.parts import *
