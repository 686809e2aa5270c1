"""How much KV cache the requests in flight may come to hold."""

from dataclasses import dataclass

from d3d_ray.records import Request


@dataclass(frozen=True, slots=True)
class KvBudget:
    num_tokens: int
    """Of all requests together."""
    slack: int
    """Tokens of a block that lie in a cache before they are accepted or cut."""

    def reserve(self, request: Request) -> int:
        """Tokens that the request may come to hold."""
        return len(request.prompt) + request.max_tokens + self.slack

    def check(self, request: Request) -> None:
        """Raise ``ValueError`` when the request could never be served."""
        if self.reserve(request) > self.num_tokens:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens with max_tokens={request.max_tokens} "
                f"needs {self.reserve(request)} tokens of KV cache and the budget is "
                f"{self.num_tokens}: ask for fewer tokens or raise runtime.kv_budget_tokens"
            )
