from protocols.diloco.step_tokens import *
