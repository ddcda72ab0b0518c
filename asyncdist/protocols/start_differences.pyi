from protocols.start_differences import *
