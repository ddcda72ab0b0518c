from protocols.simple.policy import *
