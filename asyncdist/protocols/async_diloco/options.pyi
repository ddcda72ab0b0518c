from protocols.async_diloco.options import *
