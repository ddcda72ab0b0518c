from protocols.selective.roles.donor import *
