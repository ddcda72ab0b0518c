from protocols.replay.layouts import *
