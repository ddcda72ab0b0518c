from protocols.joining.policy import *
