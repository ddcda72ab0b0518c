from protocols.diloco.radial import *
