from protocols.joining.dispatcher import *
