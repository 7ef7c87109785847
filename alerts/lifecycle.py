"""From readings to changes: inactive, pending, firing, resolved. Pure; time is an argument.

What cannot be known changes nothing: an alert whose number is unknown, or whose source stands still, is held as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from alerts.model import UNRECORDED, Alert, Change, ChangeKind, Phase
from alerts.mutes import Mute, muting
from alerts.readings import Reading
from alerts.rules import Rule, Verdict, fingerprint
from alerts.state import AlertState
from alerts.units import Unit, tell, tell_seconds

NOTHING_READ: Final = "nothing is read of it"
_Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleSettings:
    """`most_elapsed_seconds`: what lies between two evaluations counts at most for so long, since nobody looked.

    `absent_seconds`: an alert whose source is not read for so long is over. `unknown_seconds`: so is one whose number
    is not known for so long, though its source is read.
    """

    most_elapsed_seconds: float = 10.0
    absent_seconds: float = 900.0
    unknown_seconds: float = 86_400.0
    runbook_base: str = ""  # in front of "#section"


@dataclass(frozen=True, slots=True)
class Step:
    """What one evaluation made of the states: all that are open now, what happened, and which of them to write down."""

    changes: tuple[Change, ...]  # UNRECORDED, in order
    states: Mapping[str, AlertState]  # by fingerprint
    touched: frozenset[str]  # fingerprints whose state is news: not merely some seconds older


class Lifecycle:
    """The states at one time. `evaluate` changes nothing here: the next time begins with the states of its Step."""

    def __init__(
        self, rules: Sequence[Rule], states: Mapping[str, AlertState], *, settings: LifecycleSettings | None = None
    ) -> None:
        self.rules = tuple(rules)
        self.states = MappingProxyType(dict(states))
        self.settings = settings or LifecycleSettings()

    def after(self, step: Step) -> Lifecycle:
        """The same rules with the states of a Step."""
        return Lifecycle(self.rules, step.states, settings=self.settings)

    def going_on_with(self, states: Mapping[str, AlertState]) -> Lifecycle:
        """The same rules with these states in place of, or besides, those of now."""
        return Lifecycle(self.rules, {**self.states, **states}, settings=self.settings)

    def evaluate(
        self, readings: Iterable[Reading], at: float, *, elapsed_seconds: float = 0.0, mutes: Sequence[Mute] = ()
    ) -> Step:
        """Judge every rule by every reading.

        `at` is the time in Unix seconds, for people; it may be set at any time, so durations are made of
        `elapsed_seconds`, by a steady clock since the evaluation that gave these states. A muted alert fires without
        a change; that comes when the mute ends before the alert does. What was told is also told to be over.
        """
        elapsed = min(max(elapsed_seconds, 0.0), self.settings.most_elapsed_seconds)
        evaluation = _Evaluation(self, at, elapsed, tuple(mutes))
        return evaluation.run(readings)


class _Evaluation:
    """One evaluation under way."""

    def __init__(self, lifecycle: Lifecycle, at: float, elapsed: float, mutes: tuple[Mute, ...]) -> None:
        self._settings, self._rules = lifecycle.settings, lifecycle.rules
        self._before = lifecycle.states
        self._at, self._elapsed, self._mutes = at, elapsed, mutes
        self._states = dict(lifecycle.states)
        self._changes: list[Change] = []

    def run(self, readings: Iterable[Reading]) -> Step:
        self._end_of_rules()
        open_by_key = {(one.alert.rule, _key(one.alert.labels)): one.fingerprint for one in self._states.values()}
        seen: set[_Key] = set()
        judged: set[str] = set()
        for reading in readings:
            plain = _key(reading.labels)
            for rule in self._rules:
                labels = {**reading.labels, **rule.labels} if rule.labels else reading.labels
                key = (rule.name, _key(labels) if rule.labels else plain)
                if key in seen:
                    continue  # two that call themselves the same: the first one is meant
                fingerprint_open = open_by_key.get(key)
                if fingerprint_open is None and rule.number not in reading.numbers:
                    continue
                seen.add(key)
                if fingerprint_open is None:
                    self._closed(rule, reading, labels)
                else:
                    judged.add(fingerprint_open)
                    self._open(self._states[fingerprint_open], rule, reading)
        for fingerprint_open in open_by_key.values():
            if fingerprint_open not in judged:  # its source is gone, or calls itself by other labels now
                self._silent(self._states[fingerprint_open], NOTHING_READ, self._settings.absent_seconds)
        return Step(tuple(self._changes), MappingProxyType(self._states), frozenset(self._touched()))

    def _touched(self) -> Iterator[str]:
        for id in self._before.keys() | self._states.keys():
            before, after = self._before.get(id), self._states.get(id)
            if before is None or after is None or _news(before) != _news(after):
                yield id

    def _end_of_rules(self) -> None:
        rules = {rule.name: rule for rule in self._rules}
        for state in list(self._states.values()):
            rule = rules.get(state.alert.rule)
            if rule is None:
                self._end(state, state.alert, f"the rule {state.alert.rule} was removed")
            elif rule.condition != state.condition:
                self._end(state, state.alert, f"the rule {rule.name} was changed")

    # One rule and one reading

    def _closed(self, rule: Rule, reading: Reading, labels: Mapping[str, str]) -> None:
        if rule.judge(reading) is not Verdict.CROSSED:
            return
        alert = self._alert(rule, reading, labels, None)
        state = AlertState(
            phase=Phase.PENDING,
            alert=alert,
            source=reading.source,
            incarnation=reading.incarnation,
            condition=rule.condition,
        )
        self._pending(state, rule, Verdict.CROSSED)

    def _open(self, state: AlertState, rule: Rule, reading: Reading) -> None:
        if reading.incarnation != state.incarnation:
            state = replace(state, incarnation=reading.incarnation, clear_seconds=None)
            if state.phase is Phase.PENDING:
                state = replace(state, true_seconds=0.0, held="another engine of this name")
        verdict = rule.judge(reading)
        if verdict is Verdict.UNKNOWN:
            if reading.void:
                self._end(state, state.alert, reading.void)
            else:
                self._silent(state, reading.unknown or "its number is not known", self._settings.unknown_seconds)
            return
        state = replace(state, absent_seconds=0.0, quiet_seconds=state.quiet_seconds + self._elapsed)
        # What passed while nothing was known counts neither for the one nor for the other.
        elapsed = 0.0 if state.held else self._elapsed
        alert = self._alert(rule, reading, state.alert.labels, state.alert)
        if verdict is Verdict.CLEAR:
            # What was said of it stays, so that its end is told in the words of its beginning.
            shown = "no longer" if rule.says_it_all else alert.value_text
            alert = replace(state.alert, value=alert.value, value_text=shown, threshold_text=rule.over_text)
        if state.phase is Phase.PENDING:
            state = replace(state, alert=alert, true_seconds=state.true_seconds + elapsed, held="")
            self._pending(state, rule, verdict)
        else:
            clear = None
            if verdict is Verdict.CLEAR:
                clear = 0.0 if state.clear_seconds is None else state.clear_seconds + elapsed
            self._firing(replace(state, alert=alert, clear_seconds=clear, held=""), rule)

    def _pending(self, state: AlertState, rule: Rule, verdict: Verdict) -> None:
        if verdict in (Verdict.CLEAR, Verdict.UNMET):
            self._states.pop(state.fingerprint, None)
        elif state.true_seconds < rule.for_seconds:
            self._states[state.fingerprint] = state
        else:
            self._tell(replace(state, phase=Phase.FIRING, true_seconds=0.0), rule)

    def _firing(self, state: AlertState, rule: Rule) -> None:
        if state.clear_seconds is not None and state.clear_seconds >= rule.keep_firing_seconds:
            reason = "it is no longer so" if rule.says_it_all else f"it is at {state.alert.value_text} now"
            self._end(state, state.alert, reason)
        else:
            self._tell(state, rule)

    def _silent(self, state: AlertState, why: str, limit_seconds: float) -> None:
        """Nothing is known of it now: hold it as it is, but not for ever."""
        silent = state.absent_seconds + self._elapsed
        if silent >= limit_seconds:
            self._end(state, state.alert, f"{why}, and nothing is known of it for {tell_seconds(silent)}")
        else:
            quiet = state.quiet_seconds + self._elapsed
            self._states[state.fingerprint] = replace(state, absent_seconds=silent, quiet_seconds=quiet, held=why)

    # What is told

    def _tell(self, state: AlertState, rule: Rule) -> None:
        """A firing alert whose number is known: say so, where that is news."""
        kind = self._kind(state, rule)
        if kind is not None and muting(self._mutes, state.alert.rule, state.alert.labels, self._at) is None:
            state = replace(state, told=state.alert.severity, quiet_seconds=0.0)
            self._changes.append(Change(UNRECORDED, kind, state.alert, self._at))
        self._states[state.fingerprint] = state

    @staticmethod
    def _kind(state: AlertState, rule: Rule) -> ChangeKind | None:
        if state.told is None:
            return ChangeKind.FIRED
        if state.alert.severity.rank > state.told.rank:
            return ChangeKind.ESCALATED
        if rule.repeat_seconds is not None and state.quiet_seconds >= rule.repeat_seconds:
            return ChangeKind.REPEATED
        return None

    def _end(self, state: AlertState, alert: Alert, reason: str) -> None:
        if state.phase is Phase.FIRING and state.told is not None:
            # A clock that was set back must not make an alert end before it began.
            ended = replace(alert, ended_at=max(self._at, alert.started_at))
            self._changes.append(Change(UNRECORDED, ChangeKind.RESOLVED, ended, self._at, reason))
        self._states.pop(state.fingerprint, None)

    def _alert(self, rule: Rule, reading: Reading, labels: Mapping[str, str], before: Alert | None) -> Alert:
        value = reading.number(rule.number)
        texts = _texts(rule, reading, labels)
        severity = rule.severity_of(reading)
        if before is None:
            name, started = fingerprint(rule.name, labels), self._at
            episode = f"{name}-{round(started * 1000):x}"
        else:
            name, started, episode = before.fingerprint, before.started_at, before.episode
            severity = max(severity, before.severity, key=lambda one: one.rank)
        runbook = rule.runbook
        if runbook is not None and "://" not in runbook:
            runbook = f"{self._settings.runbook_base}#{runbook}" if self._settings.runbook_base else None
        return Alert(
            fingerprint=name,
            episode=episode,
            rule=rule.name,
            severity=severity,
            labels=MappingProxyType(dict(labels)),
            value=None if rule.unit is Unit.FLAG else value,
            value_text=texts["value"],
            threshold_text=texts["threshold"],
            summary=rule.summary.render(texts),
            meaning=rule.meaning.render(texts),
            action=rule.action.render(texts),
            started_at=started,
            runbook_url=runbook,
            link=reading.link,
        )


def _key(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


def _news(state: AlertState) -> tuple[object, ...]:
    """What must not be lost. Seconds may be: what is written down now and then is near enough."""
    alert = state.alert
    return state.phase, state.told, state.incarnation, bool(state.held), alert.episode, alert.severity


def _texts(rule: Rule, reading: Reading, labels: Mapping[str, str]) -> dict[str, str]:
    """What the names in a rule's texts stand for."""
    texts = {name: tell(reading.number(name), unit) for name, unit in rule.units.items()}
    texts |= {**reading.texts, **labels}
    texts["threshold"] = rule.enter.text(rule.unit)
    texts["value"] = tell(reading.number(rule.number), rule.unit)
    if rule.shows is not None:
        texts["value"] = rule.shows.render(texts)
    return texts
