from protocols.replay.values import *
