from protocols.replay_buffer.endings import *
