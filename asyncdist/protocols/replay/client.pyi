from protocols.replay.client import *
