from protocols.selective.joining.state_transfer import *
