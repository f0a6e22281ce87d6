"""Pieces of the API description: problem responses, bodies that are not JSON, and examples."""

from typing import Any

from layertap.schemas.common import Problem
from service.problems import MEDIA_TYPE

PROBLEM_DESCRIPTIONS = {
    400: "The request is incomplete or malformed.",
    401: "The token is missing or wrong.",
    404: "There is no such thing.",
    409: "The request does not fit the present state; `lease_lost` among others.",
    413: "The body is longer than the service reads.",
    415: "The body is encoded in a way that is not supported.",
    416: "The range holds no byte of the file.",
    422: "A field has a value that can't be used; `errors` names it and the remedy.",
    500: "The service failed; its log says why.",
    503: "The service can't answer at the moment; repeat the request later.",
    507: "The storage is full.",
}

PROBLEM_EXAMPLE = {
    "type": "urn:layertap:problem:unknown_model",
    "title": "Unknown model",
    "status": 422,
    "detail": "no worker registered a model 'smollm'",
    "code": "unknown_model",
    "instance": "/v1/jobs",
    "errors": [
        {
            "field": "model",
            "reason": "no worker registered a model 'smollm'",
            "remedy": "name one of: SmolLM2-135M-Instruct",
        }
    ],
}

JSONL_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "One JSON object a line.",
        "content": {
            "application/jsonl": {
                "schema": {"type": "string", "format": "binary"},
                "example": '{"prompt": "Hi", "completion": "Hello"}\n',
            }
        },
    }
}

_PINS = {
    "model_hash": "9d1c",
    "tokenizer_hash": "77ab",
    "chat_template_hash": None,
    "engine_version": "0.5.23",
    "dtype": "BF16",
}
_HELD = {"worker": "wrk_5f0c2a91", "generation": 1, "secret": "8b1f0e2d"}

BODY_EXAMPLES: dict[str, dict[str, Any]] = {
    "create_job": {
        "dataset": "ds_01jz8k3v7m4q2r5t6w8x9y0abc",
        "model": "SmolLM2-135M-Instruct",
        "preset": "eagle3",
        "max_tokens": 2048,
        "metadata": {"run": "draft-7"},
    },
    "register_worker": {
        "id": "wrk_5f0c2a91",
        "host": "node-1",
        "version": "0.1.0",
        "storage_nonce": "c0ffee",
        "models": [
            {
                "name": "SmolLM2-135M-Instruct",
                "path": "/models/SmolLM2-135M-Instruct",
                "num_layers": 30,
                "hidden_size": 576,
                "vocab_size": 49152,
                "max_row_tokens": 8192,
                "pins": _PINS,
            }
        ],
    },
    "control_worker": {
        "held": [],
        "loaded_model": "SmolLM2-135M-Instruct",
        "status": "serving",
        "draining": False,
        "figures": {
            "tokens_per_second": 27400.0,
            "tokens_per_second_mean": 26900.0,
            "plain_tokens_per_second": 28900.0,
            "plain_share": 0.948,
            "bytes_per_second": 898000000,
            "pool_fill": 0.41,
            "writer_wait": 0.0,
            "writer_busy": 0.63,
            "queued_runs": 2,
            "gpu_use": 0.99,
        },
    },
    "end_worker": {"reason": "shutdown"},
    "claim_task": {
        "worker": "wrk_5f0c2a91",
        "request_id": "0b7d4c1e9a",
        "kinds": ["plan", "shard"],
        "loaded_model": "SmolLM2-135M-Instruct",
    },
    "renew_task": {**_HELD, "rows_done": 12, "tokens_done": 9120, "phase": "prefill", "tokens_per_second": 3040.5},
    "report_row_errors": {
        **_HELD,
        "errors": [{"row_id": 7, "code": "nothing_supervised", "reason": "no token of the row is supervised"}],
    },
    "commit_plan": {
        **_HELD,
        "shards": [{"first_row": 0, "rows": 59, "tokens": 41200, "bytes": 190000000}],
        "rows": 59,
        "tokens": 41200,
        "row_errors": 1,
        "pins": _PINS,
    },
    "commit_shard": {**_HELD, "bytes": 190000000, "sha256": "0f" * 32, "rows": 59, "tokens": 41200},
    "fail_task": {**_HELD, "code": "non_finite", "reason": "the hidden states of row 7 are not finite"},
    "release_task": {**_HELD, "reason": "shutdown"},
    "report_incident": {
        "id": "inc_7c1de0b2a94f",
        "worker": "wrk_5f0c2a91",
        "model": "SmolLM2-135M-Instruct",
        "tasks": ["task_01jz8k3v7m4q2r5t6w8x9y0abd"],
        "kind": "hung_serving",
        "phase": "serving",
        "reason": "4096 tokens in flight, none captured for 301 s",
        "blame": "nobody",
        "tried": ["started unpatched: healthy", "started by plugin: healthy"],
        "processes_left": 0,
        "gpu_bytes_left": 0,
        "evidence": {
            "log_tail": "[2026-11-30 02:10:41] Prefill batch. #new-seq: 2, #new-token: 4096\n",
            "processes": [
                {
                    "pid": 4711,
                    "command": "sglang::scheduler",
                    "state": "R (running)",
                    "threads": 41,
                    "rss_bytes": 2147483648,
                    "cpu_seconds": 412.5,
                    "wait_channel": "0",
                    "stack": 'Thread 4711 (active): "MainThread"\n    forward (model_runner.py:2410)\n',
                }
            ],
            "gpu": ["0: NVIDIA H200, 81.2 of 139.8 GiB, 100 %"],
            "signals": {"tokens_captured": "81920, last moved 301.2 s ago"},
            "engine": {"version": "0.5.23"},
        },
        "happened_at": "2026-11-30T02:15:42Z",
    },
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of an operation that may answer with these problems."""
    return {status: {"$ref": f"#/components/responses/Problem{status}"} for status in statuses}


def problem_components() -> dict[str, Any]:
    """The problem responses that operations refer to, by name."""
    return {
        "Problem": _response("Any other problem."),
        **{f"Problem{status}": _response(text) for status, text in PROBLEM_DESCRIPTIONS.items()},
    }


def _response(description: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{Problem.__name__}"}
    return {"description": description, "content": {MEDIA_TYPE: {"schema": schema, "example": PROBLEM_EXAMPLE}}}
