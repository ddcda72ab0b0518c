from protocols.parameter_stream import *
