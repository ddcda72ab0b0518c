from protocols.replay.store import *
