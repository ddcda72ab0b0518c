from protocols.async_diloco.delayed_nesterov import *
