from protocols.diloco.foreign_options import *
