from protocols.async_diloco.arrivals import *
