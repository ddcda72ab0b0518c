from protocols.selective.roles.reducer import *
