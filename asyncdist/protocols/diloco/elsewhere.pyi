from protocols.diloco.elsewhere import *
