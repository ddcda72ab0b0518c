from protocols.async_diloco import *
