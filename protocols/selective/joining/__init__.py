"""Lets a restarted rank rejoin a running policy: requests for admission, and the transfer of a member's state."""
