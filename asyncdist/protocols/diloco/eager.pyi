from protocols.diloco.eager import *
