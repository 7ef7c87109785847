"""When to try again, and how fast to send at most."""

from __future__ import annotations

from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from random import Random


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Exponential back-off with equal jitter: half of each delay is fixed, the other half is random.

    The fixed half keeps a receiver in trouble from being asked again at once; the random one keeps many agents apart.
    """

    first_seconds: float = 1.0
    longest_seconds: float = 60.0
    longest_obeyed_seconds: float = 3600.0  # of what a receiver asks for

    def delay(self, attempt: int, asked_seconds: float | None, random: Random) -> float:
        """Seconds to wait after that many failures in a row (from 1); a receiver that said how long is obeyed."""
        if asked_seconds is not None:
            # A little later than asked: its clock and ours do not tick alike, and other agents were told the same.
            obeyed = min(max(asked_seconds, 0.0), self.longest_obeyed_seconds)
            return obeyed + random.uniform(0.0, 0.1 + obeyed / 10)
        doubled = self.first_seconds * 2.0 ** min(max(attempt - 1, 0), 60)
        delay = min(doubled, self.longest_seconds)
        return delay / 2 + random.uniform(0.0, delay / 2)


class TokenBucket:
    """Lets `burst` messages through at once and `per_second` over time. Not safe for several threads."""

    def __init__(self, per_second: float, burst: int = 1, *, now: float) -> None:
        """`now` is of the monotonic clock, as everywhere here."""
        self._per_second = per_second
        self._burst = float(burst)
        self._tokens = float(burst)
        self._at = now

    def ready_at(self, now: float) -> float:
        """When the next message may go."""
        self._fill(now)
        return now if self._tokens >= 1.0 else now + (1.0 - self._tokens) / self._per_second

    def take(self, now: float) -> None:
        self._fill(now)
        self._tokens -= 1.0

    def _fill(self, now: float) -> None:
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._at) * self._per_second)
        if self._tokens > 1.0 - 1e-9:  # what rounding took off must not cost one more wait of a nanosecond
            self._tokens = max(self._tokens, 1.0)
        self._at = max(self._at, now)


def parse_retry_after(value: str | None, now_unix: float) -> float | None:
    """Seconds that a Retry-After header asks for, as a number or as a date (RFC 9110 10.2.3); None where it is none."""
    if value is None:
        return None
    text = value.strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - now_unix
        except (ValueError, TypeError, OverflowError):
            return None
    return max(0.0, seconds) if seconds == seconds and abs(seconds) != float("inf") else None
