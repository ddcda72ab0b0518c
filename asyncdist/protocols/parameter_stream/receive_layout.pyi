from protocols.parameter_stream.receive_layout import *
