from protocols.replay_buffer.requests import *
