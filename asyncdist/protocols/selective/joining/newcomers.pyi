from protocols.selective.joining.newcomers import *
