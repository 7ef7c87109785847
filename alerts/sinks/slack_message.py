"""Notices as Slack messages, within Slack's documented limits, with nothing in them that a label could make act.

Whatever may hold text of a label stands in plain-text objects, in which Slack reads no markup, and has `&`, `<` and `>`
escaped, so that `<!channel>` and links stay letters anywhere. Links are ours, and are checked. Slack's limits stand at
https://docs.slack.dev/reference/block-kit/blocks; slack-sdk's blocks hold to them as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from slack_sdk.models.blocks import Block, ContextBlock, HeaderBlock, MarkdownTextObject, PlainTextObject, SectionBlock

from alerts.notice import Entry, Notice
from alerts.sinks import words
from alerts.sinks.base import clean, safe_url

HEADER_LENGTH: Final = 150
SECTION_LENGTH: Final = 3000
MOST_BLOCKS: Final = 50
LINK_LENGTH: Final = 1000
TEXT_LENGTH: Final = 3000  # Slack would take more, and advises less
PLAIN_LENGTH: Final = 1000
NAMED: Final = 20
IN_FULL: Final = 3  # alerts that one message tells everything of
ADVISED: Final = 5  # rules that a longer message says what to do about
CUT: Final = " … (cut)"
ESCAPES: Final = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def full_message(notice: Notice) -> dict[str, Any]:
    """Blocks, and a text for notifications and for clients that show no blocks."""
    named = notice.entries[:NAMED]
    blocks: list[Block] = [_header(words.headline(notice))]
    if len(notice.entries) <= IN_FULL:
        for entry in named:
            blocks += _in_full(entry, notice, alone=len(notice.entries) == 1 and not notice.counted)
    else:
        blocks += [_section(_in_brief(entry, notice.at)) for entry in named]
        blocks += _advice(named)
    if len(notice.entries) > NAMED or notice.counted:
        blocks.append(_section(_counts(notice)))
    if notice.list_url and (link := _link(notice.list_url, "All alerts")):
        blocks.append(_context([link]))
    return {
        "text": fallback(notice, TEXT_LENGTH),
        "blocks": [block.to_dict() for block in blocks[:MOST_BLOCKS]],
        **_NO_EXTRAS,
    }


def short_message(notice: Notice) -> dict[str, Any]:
    """The shortest form, for a receiver that refused the other one."""
    return {"text": fallback(notice, PLAIN_LENGTH), **_NO_EXTRAS}


def fallback(notice: Notice, length: int) -> str:
    """The notice in a few lines, without markup."""
    lines = [words.headline(notice)]
    if len(notice.entries) > 1:
        lines += [_in_brief(entry, notice.at).partition("\n")[0] for entry in notice.entries[:5]]
    elif notice.entries:
        entry = notice.entries[0]
        lines += [f"{words.how_bad(entry)}, {words.when(entry, notice.at)}", "" if entry.over else entry.alert.action]
    if len(notice.entries) > 5 or notice.counted:
        lines += words.by_rule(notice.entries, notice.counted)[:10]
    end = f"\n{_escaped_url(notice.list_url)}" if notice.list_url and _escaped_url(notice.list_url) else ""
    return fit(_defused("\n".join(line for line in lines if line)), length - len(end)) + end


def fit(text: str, length: int) -> str:
    """Escaped, not empty, and at most that long in UTF-16 units, which is how Slack's clients count."""
    text = clean(text).strip() or "-"
    whole = _take(text, length)
    return whole if whole is not None else (_take(text, length - len(CUT), partial=True) or "").rstrip() + CUT


def _take(text: str, length: int, *, partial: bool = False) -> str | None:
    pieces: list[str] = []
    for character in text:
        piece = ESCAPES.get(character, character)
        length -= len(piece) + (ord(character) > 0xFFFF)
        if length < 0:
            return "".join(pieces) if partial else None
        pieces.append(piece)
    return "".join(pieces)


def _defused(text: str) -> str:
    """Outside blocks Slack turns addresses into links; broken by a joiner of no width, they are letters."""
    return text.replace("://", ":\u2060//").replace("@", "@\u2060")


_NO_EXTRAS: Final[dict[str, Any]] = {"mrkdwn": False, "unfurl_links": False, "unfurl_media": False}


def _header(text: str) -> Block:
    return HeaderBlock(text=_plain_text(text.replace("\n", " "), HEADER_LENGTH))


def _section(text: str) -> Block:
    return SectionBlock(text=_plain_text(text, SECTION_LENGTH))


def _plain_text(text: str, length: int) -> PlainTextObject:
    return PlainTextObject(text=fit(text, length), emoji=False)


def _context(links: Iterable[str]) -> Block:
    return ContextBlock(elements=[MarkdownTextObject(text=" · ".join(links), verbatim=True)])


def _in_full(entry: Entry, notice: Notice, *, alone: bool) -> list[Block]:
    """Everything of one alert; `alone`, its title is the header already, of which a long one was cut."""
    alert, title = entry.alert, words.title(entry)
    lines = [] if alone and len(fit(title, SECTION_LENGTH)) <= HEADER_LENGTH else [title]
    if alert.labels:
        lines.append(f"Where: {words.where(alert.labels)}")
    lines.append(f"Value: {words.how_bad(entry)}")
    lines.append(f"When: {words.when(entry, notice.at)}")
    if entry.over and entry.reason:
        lines.append(f"Over because: {entry.reason}")
    blocks = [_section("\n".join(lines))]
    if not entry.over:
        blocks += [_section(f"{name}: {text}") for name, text in _advice_of(entry)]
    links = [_link(alert.link, "Show it"), _link(alert.runbook_url, "Runbook")]
    if any(links):
        blocks.append(_context(link for link in links if link))
    return blocks


def _in_brief(entry: Entry, now: float) -> str:
    return f"{words.title(entry)}\n{words.how_bad(entry)}, {words.when(entry, now)}"


def _advice(named: Sequence[Entry]) -> list[Block]:
    """What the rules of the worst firing alerts mean, each said once."""
    worst: dict[str, Entry] = {}
    for entry in named:
        if not entry.over:
            worst.setdefault(entry.alert.rule, entry)
    blocks = []
    for rule, entry in list(worst.items())[:ADVISED]:
        advice = "\n".join(f"{name}: {text}" for name, text in _advice_of(entry))
        if advice:
            blocks.append(_section(f"{rule}\n{advice}"))
    return blocks


def _advice_of(entry: Entry) -> list[tuple[str, str]]:
    pairs = (("What it means", entry.alert.meaning), ("What to do", entry.alert.action))
    return [(name, text) for name, text in pairs if text]


def _counts(notice: Notice) -> str:
    more = len(notice.entries) - NAMED
    head = f"… and {more:,} more. All by rule:" if more > 0 else "By rule, those that are only counted with them:"
    return "\n".join([head, *words.by_rule(notice.entries, notice.counted)])


def _link(url: str | None, name: str) -> str | None:
    safe = _escaped_url(url)
    return f"<{safe}|{name}>" if safe else None


def _escaped_url(url: str | None) -> str | None:
    safe = safe_url(url)
    escaped = safe.replace("&", "&amp;") if safe else None
    return escaped if escaped and len(escaped) <= LINK_LENGTH else None
