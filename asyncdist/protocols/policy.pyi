from protocols.policy import *
