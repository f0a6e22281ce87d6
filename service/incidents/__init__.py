"""Incidents: what workers report of engines that hung or died, kept and shown."""
