from protocols.joining.messages import *
