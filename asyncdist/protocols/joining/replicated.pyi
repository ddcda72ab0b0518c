from protocols.joining.replicated import *
