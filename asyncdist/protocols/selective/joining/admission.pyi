from protocols.selective.joining.admission import *
