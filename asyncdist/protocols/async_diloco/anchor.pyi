from protocols.async_diloco.anchor import *
