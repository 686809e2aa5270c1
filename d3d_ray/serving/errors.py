"""Everything that can go wrong with a request, as a body in OpenAI's form."""

from collections.abc import Sequence
from typing import Any

from d3d_ray.runtime.answers import RequestFailedError, VerifierDiedError

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    409: "ConflictError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}
RETRY_AFTER_S = 1


class ApiError(Exception):
    """An answer with this HTTP status; ``param`` names the field that it is about."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param

    @property
    def headers(self) -> dict[str, str]:
        match self.status:
            case 429 | 503:
                return {"Retry-After": str(RETRY_AFTER_S)}
            case 401:
                return {"WWW-Authenticate": "Bearer"}
        return {}

    def body(self) -> dict[str, Any]:
        is_ours = self.status >= 500
        kind = _TYPES.get(self.status, "InternalServerError" if is_ours else "BadRequestError")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.status}
        return {"error": error}


def to_api_error(error: BaseException) -> ApiError:
    """What a client is told of an error of the engine."""
    match error:
        case ApiError():
            return error
        case OverflowError():
            return ApiError(429, str(error))
        case VerifierDiedError():
            return ApiError(503, str(error))
        case RequestFailedError():
            return ApiError(500, str(error))
        case TimeoutError():
            return ApiError(503, "the verifier is not ready: it is being started, ask again")
        case ValueError():
            return ApiError(400, str(error))
    return ApiError(500, "the server failed on this request; its log says why")


def from_validation(errors: Sequence[Any]) -> ApiError:
    """The first of pydantic's errors; of a union's, the one that went deepest into the value."""
    found = max(errors, key=lambda error: len(error["loc"]))
    path = [str(part) for part in found["loc"] if part != "body"]
    if found["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {found.get('ctx', {}).get('error', '')}")
    where = ".".join(path)
    message = str(found["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{where}: {message}" if where else message, param=where or None)
