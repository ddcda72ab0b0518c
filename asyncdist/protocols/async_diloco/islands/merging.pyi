from protocols.async_diloco.islands.merging import *
