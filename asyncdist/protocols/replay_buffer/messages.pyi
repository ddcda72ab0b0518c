from protocols.replay_buffer.messages import *
