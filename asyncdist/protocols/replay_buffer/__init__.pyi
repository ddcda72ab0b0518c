from protocols.replay_buffer import *
