from protocols.wrappers import *
