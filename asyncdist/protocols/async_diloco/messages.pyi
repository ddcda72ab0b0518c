from protocols.async_diloco.messages import *
