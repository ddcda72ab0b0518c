from protocols.evolution.policy import *
