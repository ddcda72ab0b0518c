"""Divides ranks into islands with separate policies. The best ranks of an island become donors in other islands."""
