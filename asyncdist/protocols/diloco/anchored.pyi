from protocols.diloco.anchored import *
