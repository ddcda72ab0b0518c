from protocols.own_state import *
