from protocols.selective.roles.reporter import *
