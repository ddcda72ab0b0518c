from protocols.exchange.replicas.division import *
