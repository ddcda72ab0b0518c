from protocols.async_diloco.pace import *
