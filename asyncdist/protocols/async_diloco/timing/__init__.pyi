from protocols.async_diloco.timing import *
