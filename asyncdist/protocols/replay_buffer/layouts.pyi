from protocols.replay_buffer.layouts import *
