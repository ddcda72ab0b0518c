from protocols.exchange.wire_layout import *
