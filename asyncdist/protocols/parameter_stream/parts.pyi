from protocols.parameter_stream.parts import *
