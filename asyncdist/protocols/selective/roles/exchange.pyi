from protocols.selective.roles.exchange import *
