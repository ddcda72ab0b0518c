from protocols.replay_buffer.store import *
