from protocols.start_without_lost import *
