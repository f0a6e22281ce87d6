"""The API description: FastAPI's, with the problem schema on every operation. `python -m service.openapi` prints it."""

import sys
from typing import Any

from fastapi import FastAPI

from layertap.schemas.common import Problem
from service.openapi_parts import problem_response

_SUMMARY = "Hidden states of large language models, as a service."
_TAGS = [
    {"name": "datasets", "description": "Upload the rows to run through the model."},
    {"name": "jobs", "description": "Ask for hidden states, and follow the work."},
    {"name": "shards", "description": "Download the results."},
    {"name": "models", "description": "What jobs may name."},
    {"name": "workers", "description": "The worker protocol: who is there."},
    {"name": "tasks", "description": "The worker protocol: leases."},
    {"name": "health", "description": "Alive and ready."},
]
_METHODS = frozenset({"get", "head", "post", "put", "patch", "delete"})


def describe(app: FastAPI) -> None:
    """Make `app.openapi()` the description that is committed as `openapi.yaml`."""
    generate = app.openapi
    app.openapi_tags = _TAGS
    app.summary = _SUMMARY

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None or "x-problems" not in app.openapi_schema:
            app.openapi_schema = _with_problems(generate())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _with_problems(document: dict[str, Any]) -> dict[str, Any]:
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    problem = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(problem.pop("$defs", {}))
    schemas[Problem.__name__] = problem
    for path, item in document["paths"].items():
        for method, operation in item.items():
            if method in _METHODS:
                _finish(operation, path, method)
    document["components"]["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "LAYERTAP_TOKEN, where the service has one."}
    }
    document["security"] = [{"token": []}, {}]
    document["x-problems"] = "urn:layertap:problem:<code>"
    return document


def _finish(operation: dict[str, Any], path: str, method: str) -> None:
    operation["operationId"] = operation["operationId"].split("_v1_")[0] + ("_head" if method == "head" else "")
    responses = operation["responses"]
    if "422" in responses and "application/problem+json" not in responses["422"].get("content", {}):
        responses["422"] = problem_response("Unprocessable Content")
    responses["default"] = problem_response("Any other problem")
    if path.startswith("/v1/"):
        responses.setdefault("401", problem_response("Unauthorized"))


def main() -> None:
    """Print the description as YAML."""
    import yaml

    from service.app import create_app

    yaml.safe_dump(create_app().openapi(), sys.stdout, sort_keys=False, allow_unicode=True, width=120)


if __name__ == "__main__":
    main()
