from protocols.selective_diloco.trials import *
