from protocols.selective.roles.mean_receiver import *
