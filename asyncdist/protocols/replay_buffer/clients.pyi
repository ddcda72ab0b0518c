from protocols.replay_buffer.clients import *
