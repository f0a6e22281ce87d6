"""Fixtures are kept by part, one file each."""

pytest_plugins = [
    "fixtures_client",
    "fixtures_service_process",
    "fixtures_models",
    "fixtures_service",
    "fixtures_stack",
    "fixtures_packages",
]
