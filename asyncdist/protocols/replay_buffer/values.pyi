from protocols.replay_buffer.values import *
