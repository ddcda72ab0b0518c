"""The joint start of a policy's members: without lost ranks, and with errors that explain why a start fails."""
