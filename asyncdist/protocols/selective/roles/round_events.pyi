from protocols.selective.roles.round_events import *
