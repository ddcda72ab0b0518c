from protocols.diloco.policy import *
