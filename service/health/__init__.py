"""Whether the service is alive and ready."""
