from protocols.joining.newcomers import *
