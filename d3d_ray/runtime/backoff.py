"""When to try again what keeps failing."""

FIRST_S, LAST_S = 1.0, 60.0
MAX_FAILURES = 5


class Backoff:
    """Waits 1, 2, 4 … seconds between failures in a row, at most a minute, and then gives up."""

    def __init__(self) -> None:
        self.num_failures = 0
        """In a row."""

    def fail(self) -> float | None:
        """Take note of a failure; the seconds to wait before the next try, None = no more."""
        self.num_failures += 1
        if self.num_failures >= MAX_FAILURES:
            return None
        return float(min(FIRST_S * 2 ** (self.num_failures - 1), LAST_S))

    def succeed(self) -> None:
        self.num_failures = 0

    def allow_one(self) -> None:
        """One more try; when it fails, that was the last."""
        self.num_failures = MAX_FAILURES - 1
