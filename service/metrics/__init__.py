"""The service's figures for Prometheus."""
