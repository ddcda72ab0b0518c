from protocols.selective.roles import *
