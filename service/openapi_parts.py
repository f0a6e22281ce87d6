"""Pieces of the API description that endpoints name: problem responses and bodies that are not JSON."""

from http import HTTPStatus
from typing import Any

from layertap.schemas.common import Problem
from service.problems import MEDIA_TYPE

_EXAMPLE = {
    "type": "urn:layertap:problem:job_not_found",
    "title": "Job not found",
    "status": 404,
    "detail": "there is no job 'job_x'",
    "code": "job_not_found",
    "instance": "/v1/jobs/job_x",
    "errors": [{"field": "job", "reason": "there is no job 'job_x'", "remedy": "list what exists"}],
}

JSONL_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "One JSON object a line.",
        "content": {
            "application/jsonl": {
                "schema": {"type": "string", "format": "binary"},
                "example": '{"prompt": "Hi", "completion": "Hello"}',
            }
        },
    }
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of an operation that may answer with these problems."""
    return {status: problem_response(HTTPStatus(status).phrase) for status in statuses}


def problem_response(description: str) -> dict[str, Any]:
    """One problem response."""
    schema = {"$ref": f"#/components/schemas/{Problem.__name__}"}
    return {"description": description, "content": {MEDIA_TYPE: {"schema": schema, "example": _EXAMPLE}}}
