from protocols.joining.replica_layout import *
