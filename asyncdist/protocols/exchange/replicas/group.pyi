from protocols.exchange.replicas.group import *
