from protocols.async_diloco.islands import *
