"""What a request must pass before the app sees it: Host, Origin, token, and the size of its body.

Host and Origin are checked even without a token: a web page whose name was pointed at this machine (DNS rebinding)
sends its own name in both.
"""

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from layertap.schemas.incidents import MAX_REPORT_BYTES
from service.problems import ProblemError, response
from service.settings import LOOPBACK_NAMES, Settings

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_UPLOAD = ("POST", "/v1/datasets")
_SMALLER = {("POST", "/v1/incidents"): MAX_REPORT_BYTES}
"""Bodies with a bound of their own, below that of all."""


def needs_token(path: str) -> bool:
    """Whether the service's token, where it has one, is asked for there."""
    return path in ("/v1", "/metrics") or path.startswith("/v1/")


class Guard:
    """The checks, around an ASGI app."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._names = LOOPBACK_NAMES | {settings.host.lower()} | set(settings.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with a problem, or hand the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            operation = (scope["method"], scope["path"])
            self._check(*operation, Headers(scope=scope))
            if scope["method"] not in _SAFE_METHODS and operation != _UPLOAD:
                most = min(self._settings.max_body_bytes, _SMALLER.get(operation, self._settings.max_body_bytes))
                receive = await _whole_body(Headers(scope=scope), receive, most)
        except ProblemError as error:
            await response(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        host = headers.get("host", "")
        if not self._allowed(host):
            detail = f"the service does not answer under the name {host!r}"
            remedy = "add the name to LAYERTAP_ALLOWED_HOSTS"
            raise ProblemError(421, "host_not_allowed", detail, field="Host", remedy=remedy)
        origin = headers.get("origin")
        if origin is not None and method not in _SAFE_METHODS and not self._allowed(_authority(origin)):
            detail = f"pages of {origin!r} may not change anything here"
            remedy = "add the page's host to LAYERTAP_ALLOWED_HOSTS"
            raise ProblemError(403, "origin_not_allowed", detail, field="Origin", remedy=remedy)
        if needs_token(path):
            self._check_token(headers)

    def _check_token(self, headers: Headers) -> None:
        if self._settings.token is None:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        expected = self._settings.token.get_secret_value().encode()
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("utf-8", "replace"), expected):
            raise ProblemError(
                401,
                "unauthorized",
                "the request carries no valid token",
                field="Authorization",
                remedy="send the header Authorization: Bearer with the service's LAYERTAP_TOKEN",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _allowed(self, authority: str) -> bool:
        name = _host(authority)
        if name in self._names:
            return True
        # Beyond loopback a token is required, and no name can be pointed elsewhere in a plain address.
        return not self._settings.loopback and _is_address(name)


async def _whole_body(headers: Headers, receive: Receive, most: int) -> Receive:
    declared = headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > most:
        raise _too_large(most)
    body, more, last = bytearray(), True, None
    while more:
        message = await receive()
        if message["type"] != "http.request":
            last = message
            break
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > most:
            raise _too_large(most)
    waiting: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]
    if last is not None:
        waiting = [last]

    async def replay() -> Message:
        return waiting.pop(0) if waiting else await receive()

    return replay


def _too_large(most: int) -> ProblemError:
    detail = f"the body is longer than {most} bytes"
    headers = {"Connection": "close"}
    return ProblemError(413, "body_too_large", detail, field="body", remedy="send a smaller body", headers=headers)


def _host(authority: str) -> str:
    try:
        return (urlsplit(f"//{authority}").hostname or "").lower()
    except ValueError:
        return ""


def _authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
