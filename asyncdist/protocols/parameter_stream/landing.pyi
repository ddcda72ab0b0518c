from protocols.parameter_stream.landing import *
