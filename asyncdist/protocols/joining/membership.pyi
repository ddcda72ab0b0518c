from protocols.joining.membership import *
