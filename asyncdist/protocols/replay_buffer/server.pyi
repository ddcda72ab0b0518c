from protocols.replay_buffer.server import *
