from protocols.diloco import *
