from protocols.async_diloco.islands.federation import *
