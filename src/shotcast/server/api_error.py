"""What clients are told when it does not work out: a status, and a body in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """An answer that is not the one that was asked for.

    Attributes:
        status: of HTTP.
        param: the parameter at fault.
        code: the cause in one word, for programs.
        headers: that go with the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        if self.status == 429:
            kind = "rate_limit_error"
        else:
            kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
