from protocols.selective.round_events import *
