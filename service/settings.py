"""Settings of the service, read in this one place: command flags first, then `LAYERTAP_*`, then the defaults."""

import ipaddress
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class Settings(BaseSettings):
    """Everything that can be set. Durations are seconds, sizes bytes.

    Raises pydantic's `ValidationError` when a value is wrong, or when the service would listen beyond loopback without
    a token.
    """

    model_config = SettingsConfigDict(env_prefix="LAYERTAP_", frozen=True, extra="ignore")

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8178
    database_url: str = "sqlite:///.layertap/layertap.sqlite3"
    storage: Path = Path(".layertap/storage")
    token: SecretStr | None = None
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    """Host names besides loopback and `host` under which the service may be called; a comma-separated list."""

    lease_seconds: Annotated[float, Field(gt=0, le=3600)] = 30.0
    max_attempts: Annotated[int, Field(ge=1)] = 3
    max_expiries: Annotated[int, Field(ge=1)] = 10
    upkeep_seconds: Annotated[float, Field(gt=0)] = 2.0
    """How often expired leases, lost workers and unfinished jobs are looked for."""
    worker_keep_seconds: Annotated[float, Field(gt=0)] = 604800.0
    """How long a worker that is gone or lost stays listed."""

    header_seconds: Annotated[float, Field(gt=0)] = 10.0
    body_stall_seconds: Annotated[float, Field(gt=0)] = 30.0
    keep_alive_seconds: Annotated[int, Field(gt=0)] = 30
    stop_seconds: Annotated[int, Field(gt=0)] = 10
    event_poll_seconds: Annotated[float, Field(gt=0)] = 0.5
    max_event_streams: Annotated[int, Field(ge=1)] = 64
    max_body_bytes: Annotated[int, Field(ge=1024)] = 32 * 1024 * 1024
    """Longest body of a request other than an upload."""

    database_connections: Annotated[int, Field(ge=1)] = 10
    database_wait_seconds: Annotated[float, Field(gt=0)] = 15.0

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip().lower() for part in value.split(",") if part.strip())
        return value

    @model_validator(mode="after")
    def _token_beyond_loopback(self) -> Self:
        if self.token is not None and not self.token.get_secret_value():
            raise ValueError("LAYERTAP_TOKEN is empty; unset it or give it a value")
        if self.token is None and not self.loopback:
            raise ValueError(
                f"host {self.host} is reachable from other machines; set LAYERTAP_TOKEN, or listen on 127.0.0.1"
            )
        return self

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        if self.host in LOOPBACK_NAMES:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
