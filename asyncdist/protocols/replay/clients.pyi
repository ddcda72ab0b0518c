from protocols.replay.clients import *
