from protocols.replay.endings import *
