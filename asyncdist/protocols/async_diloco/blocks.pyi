from protocols.async_diloco.blocks import *
