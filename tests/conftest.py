"""Fixtures are kept by part, one file each."""

pytest_plugins = ["fixtures_client", "fixtures_models"]
