from protocols.selective.roles.relay import *
