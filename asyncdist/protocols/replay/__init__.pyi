from protocols.replay import *
