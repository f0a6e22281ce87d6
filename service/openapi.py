"""The API description: FastAPI's, with the problem schema on every operation. `python -m service.openapi` prints it."""

import sys
from typing import Any

import yaml
from fastapi import FastAPI

from layertap.schemas.common import Problem
from service.guard import needs_token
from service.openapi_parts import BODY_EXAMPLES, problem_components

_SUMMARY = "Hidden states of large language models, as a service."
_TAGS = [
    {"name": "datasets", "description": "Upload the rows to run through the model."},
    {"name": "jobs", "description": "Ask for hidden states, and follow the work."},
    {"name": "shards", "description": "Download the results."},
    {"name": "models", "description": "What jobs may name."},
    {"name": "workers", "description": "The worker protocol: who is there."},
    {"name": "tasks", "description": "The worker protocol: leases."},
    {"name": "incidents", "description": "What went wrong with an engine, and the evidence."},
    {"name": "metrics", "description": "How fast it goes, for Prometheus."},
    {"name": "health", "description": "Alive and ready."},
]
_METHODS = frozenset({"get", "head", "post", "put", "patch", "delete"})


def describe(app: FastAPI) -> None:
    """Make `app.openapi()` the description that is committed as `openapi.yaml`."""
    generate = app.openapi
    app.openapi_tags = _TAGS
    app.summary = _SUMMARY

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _with_problems(generate())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _with_problems(document: dict[str, Any]) -> dict[str, Any]:
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    problem = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(problem.pop("$defs", {}))
    schemas[Problem.__name__] = problem
    components["responses"] = problem_components()
    components["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "LAYERTAP_TOKEN, where the service has one."}
    }
    document["security"] = [{"token": []}, {}]
    for path, item in document["paths"].items():
        for method, operation in item.items():
            if method in _METHODS:
                _finish(operation, path, method)
    return document


def _finish(operation: dict[str, Any], path: str, method: str) -> None:
    """Give one operation its id, its summary, its problems and its example."""
    first, _, rest = operation.get("description", "").partition("\n")
    operation["summary"] = first.strip().rstrip(".")
    if rest.strip():
        operation["description"] = rest.strip()
    else:
        operation.pop("description", None)
    responses = operation["responses"]
    for status, answer in list(responses.items()):
        # FastAPI adds its own 422, and a description beside the reference.
        if "$ref" in answer or (status == "422" and "HTTPValidationError" in str(answer)):
            responses[status] = {"$ref": f"#/components/responses/Problem{status}"}
    if needs_token(path):
        responses["401"] = {"$ref": "#/components/responses/Problem401"}
    responses["default"] = {"$ref": "#/components/responses/Problem"}
    if (example := BODY_EXAMPLES.get(operation["operationId"])) is not None:
        operation["requestBody"]["content"]["application/json"]["example"] = example


def render() -> str:
    """The description as YAML, the same wherever it is made."""
    from service.app import create_app

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    document = create_app().openapi()
    return yaml.dump(document, Dumper=Plain, sort_keys=False, allow_unicode=True, width=120)


if __name__ == "__main__":
    sys.stdout.write(render())
