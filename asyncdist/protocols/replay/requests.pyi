from protocols.replay.requests import *
