from protocols.step_info import *
