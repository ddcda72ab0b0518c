from protocols.diloco.schedule import *
