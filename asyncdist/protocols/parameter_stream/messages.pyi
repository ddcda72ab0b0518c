from protocols.parameter_stream.messages import *
