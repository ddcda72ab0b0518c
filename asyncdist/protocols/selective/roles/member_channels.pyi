from protocols.selective.roles.member_channels import *
