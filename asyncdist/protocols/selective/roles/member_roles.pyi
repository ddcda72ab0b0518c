from protocols.selective.roles.member_roles import *
