from protocols.simple.topologies import *
