"""What the agent says of itself: whether what it has to say comes through."""

from __future__ import annotations

from agent.alerting.own import Delivery, OwnFeed


def refused(feed: OwnFeed, *deliveries: tuple[str, int, int]) -> float | None:
    """By receiver: messages that were sent, and that were given up."""
    return feed._refused([Delivery(sink, 0.0, sent, lost) for sink, sent, lost in deliveries])


def test_a_refusal_ends_with_its_receiver_s_next_message_though_another_was_never_sent_any() -> None:
    """A receiver that takes critical alerts alone may be sent nothing for months."""
    feed = OwnFeed("node-1", 1.0, list)
    assert refused(feed, ("slack", 0, 0), ("webhook", 0, 0)) is None
    assert refused(feed, ("slack", 0, 0), ("webhook", 0, 1)) == 1.0
    assert refused(feed, ("slack", 0, 0), ("webhook", 1, 1)) == 0.0


def test_an_agent_that_starts_anew_knows_nothing_until_each_was_sent_a_message() -> None:
    feed = OwnFeed("node-1", 1.0, list)
    assert refused(feed, ("slack", 0, 0), ("webhook", 1, 0)) is None
    assert refused(feed, ("slack", 1, 0), ("webhook", 1, 0)) == 0.0
