"""`python -m service`: read the settings, open the parts, serve until told to stop."""

import argparse
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import uvicorn
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from service.app import create_app, open_context
from service.context import Context
from service.db.engine import DatabaseInUseError, UnsupportedDatabaseError
from service.protocol import deadline_protocol
from service.settings import Settings

_log = logging.getLogger("service")


class Server(uvicorn.Server):
    """uvicorn's server, which tells long answers to end when it is to stop, and says where it listens."""

    def __init__(self, config: uvicorn.Config, context: Context) -> None:
        super().__init__(config)
        self._context = context

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to serve."""
        await super().startup(sockets)
        for listening in sockets or ():
            host, port = listening.getsockname()[:2]
            _log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests end, within the bound of the settings."""
        self._context.stopping.set()
        await super().shutdown(sockets)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve. The exit status is 2 where the settings are wrong, 1 where the parts can't be opened."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    try:
        settings = _settings(arguments)
    except ValidationError as error:
        for problem in error.errors():
            name = ".".join(str(part) for part in problem["loc"]) or "settings"
            print(f"layertap service: {name}: {problem['msg']}", file=sys.stderr)
        return 2
    try:
        listening = _listen(settings)
    except OSError as error:
        print(f"layertap service: can't listen on {settings.host}:{settings.port}: {error}", file=sys.stderr)
        return 1
    with listening:
        try:
            context = open_context(settings)
        except (DatabaseInUseError, UnsupportedDatabaseError, SQLAlchemyError, OSError) as error:
            print(f"layertap service: {error}", file=sys.stderr)
            return 1
        config = uvicorn.Config(
            create_app(context),
            http=deadline_protocol(settings),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=settings.keep_alive_seconds,
            timeout_graceful_shutdown=settings.stop_seconds,
        )
        # uvicorn raises the signal that stopped it once more at its end; by then all is done.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: sys.exit(0))
        Server(config, context).run(sockets=[listening])
    return 0


def _settings(arguments: Sequence[str] | None) -> Settings:
    parser = argparse.ArgumentParser(prog="layertap service", description="The control plane of Layertap.")
    parser.add_argument("--host", help="address to listen on (LAYERTAP_HOST, default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on, 0 for any (LAYERTAP_PORT, default 8178)")
    parser.add_argument("--database-url", help="sqlite:///FILE or postgresql://HOST/NAME (LAYERTAP_DATABASE_URL)")
    parser.add_argument("--storage", type=Path, help="storage directory (LAYERTAP_STORAGE)")
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    return Settings(**given)


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    return socket.create_server((settings.host, settings.port), family=family, backlog=1024)


if __name__ == "__main__":
    sys.exit(main())
