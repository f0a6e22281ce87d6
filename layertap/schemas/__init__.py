"""Requests and responses of the HTTP interface, shared by client, service and worker."""
