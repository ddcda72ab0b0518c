from protocols.replay.server import *
