from protocols.joining.state_transfer import *
