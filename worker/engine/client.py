"""Requests to the engine: prefill rows of token ids, abort them, ask what it is.

Rows go out as lists with a request id each; nothing is sampled and no log-probability is computed.
"""

import secrets
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt


class EngineDownError(Exception):
    """The engine does not answer, or answers with a failure of its own."""


class RowsTimedOutError(EngineDownError):
    """No answer to these rows within `seconds`; the engine may be well, and only one of them stuck."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"/generate: no answer within {seconds:g} s")
        self.seconds = seconds


class RowsFailedError(EngineDownError):
    """These rows were answered with an error of the server's own; it may be well, and only one of them at fault."""


class EngineGoneError(EngineDownError):
    """The engine was down before these rows were sent: what brought it down was something else."""


class EngineRefusedError(Exception):
    """The engine will not take these rows; the message is its own."""


@dataclass(frozen=True)
class EngineInfo:
    """What a serving engine says of itself: `max_row_tokens` is the longest row it takes."""

    version: str
    max_row_tokens: int
    server_args: dict[str, Any]


_KEEP_IDLE_S = 2.0
_REPORTED_ARGS = (
    "model_path", "dtype", "quantization", "kv_cache_dtype", "tp_size", "dp_size", "pp_size", "ep_size",
    "attention_backend", "chunked_prefill_size", "max_prefill_tokens", "max_total_tokens", "disable_radix_cache",
    "disable_cuda_graph", "disable_overlap_schedule", "mem_fraction_static", "context_length", "load_format", "device",
)  # fmt: skip


class EngineClient:
    """Speaks to one engine on loopback; close it with `aclose`. Rows are waited for `prefill_timeout` seconds."""

    def __init__(self, port: int, api_key: str, prefill_timeout: float) -> None:
        self.port = port
        self._prefill_timeout = prefill_timeout
        self._http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(10.0, read=prefill_timeout, pool=None),
            # The engine closes a connection after 5 idle seconds: one given up before is never used just as it closes.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=_KEEP_IDLE_S),
            trust_env=False,
        )

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def serving(self) -> bool:
        """Whether the server answers its health check."""
        try:
            response = await self._http.get("/health", timeout=5.0)
        except httpx.TransportError:
            return False
        return response.is_success

    async def info(self) -> EngineInfo:
        """What the engine is. Raises `EngineDownError`."""
        response = await self._send("GET", "/get_server_info", timeout=30.0)
        if not response.is_success:
            raise EngineDownError(f"/get_server_info: HTTP {response.status_code}: {_message(response)}")
        answer = response.json()
        # The scheduler refuses a row of max_req_input_len tokens and more.
        return EngineInfo(
            version=str(answer.get("version", "unknown")),
            max_row_tokens=int(answer["max_req_input_len"]) - 1,
            server_args={name: answer[name] for name in _REPORTED_ARGS if name in answer},
        )

    async def prefill(self, rids: list[str], rows: list[npt.NDArray[np.int32]], **options: object) -> list[str | None]:
        """Prefills rows [S_i] of token ids. For each: None, or why the engine aborted it.

        `options` are further fields of SGLang's request.

        Raises `EngineRefusedError` when it takes none of them, `RowsTimedOutError` when it has not answered in time,
        `RowsFailedError` when it answers with an error of its own, `EngineDownError` when it can't be reached.
        """
        outcome = await self._generate(rids, rows, **options)
        return [_abort_reason(outcome, rid) for rid in rids]

    async def answers(self) -> None:
        """Has a row of two tokens prefilled that is nobody's. Raises `EngineGoneError` when nothing comes of it."""
        try:
            await self._generate([f"alive-{secrets.token_hex(6)}."], [np.zeros(2, dtype=np.int32)])
        except EngineDownError as error:
            raise EngineGoneError(str(error)) from error

    async def prefill_all(self, rids: list[str], rows: list[npt.NDArray[np.int32]]) -> None:
        """Prefills rows [S_i] that must all come through.

        Raises like `prefill`, and `EngineRefusedError` where the engine aborts one.
        """
        _refuse_aborted(await self._generate(rids, rows), rids)

    async def log_probabilities(self, rids: list[str], rows: list[npt.NDArray[np.int32]]) -> list[list[float]]:
        """Prefills rows [S_i] and returns the log-probability of each token but the first, [S_i − 1].

        Raises like `prefill`, and `EngineRefusedError` where the engine aborts one.
        """
        outcome = await self._generate(rids, rows, return_logprob=True, logprob_start_len=0)
        _refuse_aborted(outcome, rids)
        return [[float(entry[0]) for entry in outcome[rid]["input_token_logprobs"][1:]] for rid in rids]

    async def _generate(
        self, rids: list[str], rows: list[npt.NDArray[np.int32]], **options: object
    ) -> dict[str, dict[str, Any]]:
        body = {
            "rid": rids,
            "input_ids": [row.tolist() for row in rows],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            **options,
        }
        try:
            response = await self._send("POST", "/generate", json=body)
        except EngineDownError as error:
            if isinstance(error.__cause__, httpx.ReadTimeout):
                raise RowsTimedOutError(self._prefill_timeout) from error
            raise
        if 400 <= response.status_code < 500:
            raise EngineRefusedError(_message(response))
        if not response.is_success:
            raise RowsFailedError(f"/generate: HTTP {response.status_code}: {_message(response)}")
        return {answer["meta_info"]["id"]: answer["meta_info"] for answer in response.json()}

    async def abort(self, rid: str) -> None:
        """Aborts the request of this id, if the engine knows it. Raises `EngineDownError`."""
        response = await self._send("POST", "/abort_request", json={"rid": rid}, timeout=10.0)
        if not response.is_success:
            raise EngineDownError(f"/abort_request: HTTP {response.status_code}: {_message(response)}")

    async def _send(self, method: str, path: str, **more: Any) -> httpx.Response:
        if self._http.is_closed:
            raise EngineDownError(f"{path}: the engine has been stopped")
        try:
            return await self._http.request(method, path, **more)
        except httpx.TransportError as error:
            raise EngineDownError(f"{path}: {error!r}") from error


def _message(response: httpx.Response) -> str:
    try:
        answer = response.json()
        return str(answer["error"]["message"] if "error" in answer else answer)[:1000]
    except (ValueError, KeyError, TypeError):
        return response.text[:1000]


def _abort_reason(outcome: dict[str, dict[str, Any]], rid: str) -> str | None:
    finish = outcome.get(rid, {}).get("finish_reason", {"type": "missing"}) or {}
    kind = finish.get("type")
    if kind in ("length", "stop"):
        return None
    return str(finish.get("message") or f"finished as {kind}")


def _refuse_aborted(outcome: dict[str, dict[str, Any]], rids: list[str]) -> None:
    reasons = [reason for rid in rids if (reason := _abort_reason(outcome, rid)) is not None]
    if reasons:
        raise EngineRefusedError(f"it aborted {len(reasons)} of {len(rids)} rows: {reasons[0]}")
