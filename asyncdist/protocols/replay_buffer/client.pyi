from protocols.replay_buffer.client import *
