from protocols.exchange.replicas.crew import *
