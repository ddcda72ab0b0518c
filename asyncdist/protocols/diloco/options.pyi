from protocols.diloco.options import *
