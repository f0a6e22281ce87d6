"""Shards and manifests: what a job hands over."""
