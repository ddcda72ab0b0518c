from protocols.parameter_stream.neighbours import *
