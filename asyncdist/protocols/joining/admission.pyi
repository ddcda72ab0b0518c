from protocols.joining.admission import *
