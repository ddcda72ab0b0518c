from protocols.selective.roles.resources import *
