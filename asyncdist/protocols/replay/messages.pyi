from protocols.replay.messages import *
