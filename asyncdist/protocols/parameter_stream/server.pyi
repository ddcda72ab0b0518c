from protocols.parameter_stream.server import *
