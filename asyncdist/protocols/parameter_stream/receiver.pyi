from protocols.parameter_stream.receiver import *
