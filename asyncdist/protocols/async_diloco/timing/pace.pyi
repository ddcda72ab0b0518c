from protocols.async_diloco.timing.pace import *
