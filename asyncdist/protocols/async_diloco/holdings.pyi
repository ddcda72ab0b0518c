from protocols.async_diloco.holdings import *
