from protocols.simple.gossip import *
