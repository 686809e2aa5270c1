"""Stop strings, found wherever they fall in a text that comes in pieces."""

from collections.abc import Sequence


class StopFinder:
    """Hands out the text before the first stop string, and holds back what may begin one.

    The first is the one that ends first; of those that end together, the longest. Once it was
    found nothing more comes.
    """

    def __init__(self, stops: Sequence[str], *, is_included: bool = False) -> None:
        self._stops = tuple(stops)
        self._is_included = is_included
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """What can be handed out now that ``text`` has come."""
        if self.found is not None:
            return ""
        text = self._held + text
        hits = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops]
        hits = [hit for hit in hits if hit[0] + hit[1] >= 0]
        if hits:
            end, minus_length, self.found = min(hits)
            self._held = ""
            return text[: end if self._is_included else end + minus_length]
        num_held = self._length_of_start(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """What was held back; no more comes."""
        held, self._held = self._held, ""
        return held

    def _length_of_start(self, text: str) -> int:
        """Of the longest end of ``text`` that a stop string begins with."""
        longest = max((len(stop) for stop in self._stops), default=0)
        for length in range(min(longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
