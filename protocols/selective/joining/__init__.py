"""Lets a rank that was started again take part in selective averaging: admission, and the transfer of its state."""
