from protocols.async_diloco.corrections import *
