from protocols.simple.gossip_state import *
