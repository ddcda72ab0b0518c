from protocols.exchange.replicas import *
