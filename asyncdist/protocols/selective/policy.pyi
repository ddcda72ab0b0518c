from protocols.selective.policy import *
