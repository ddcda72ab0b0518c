from protocols.diloco.fragment_state import *
