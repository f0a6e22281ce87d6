"""Tasks: the worker protocol of leases."""
