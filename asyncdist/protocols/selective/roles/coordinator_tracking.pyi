from protocols.selective.roles.coordinator_tracking import *
