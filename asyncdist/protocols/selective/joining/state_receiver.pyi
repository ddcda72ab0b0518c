from protocols.selective.joining.state_receiver import *
