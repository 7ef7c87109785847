"""A store whose file cannot be opened at the start, since its volume is not ready, and can be half a minute later."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from alerts.courier import Courier
from alerts.grouping import Cadence, compose
from alerts.model import Alert, Severity
from alerts.mutes import Mute
from alerts.notice import News, Notice
from alerts.sinks.base import Outcome, Sent
from alerts.state import AlertState, StateUnreadable
from alerts.store import MEND_SECONDS, Store
from tests.alerts.conftest import START, TurnedClock, fired, make_alert, resolved

SINK = "slack"
NIGHT = Mute(id="m", rule=None, engine="a", author="ada", comment="", created_at=START, expires_at=START + 86_400)


class Volume:
    """The folder of the store; while it is away, a file stands in its place, which stops whoever asks, root too."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._away = folder, folder.with_name("away")

    def take_away(self) -> None:
        os.replace(self.folder, self._away)
        self.folder.touch()

    def bring_back(self) -> None:
        self.folder.unlink()
        os.replace(self._away, self.folder)


class Agent:
    """A store and what one sink is told from it."""

    name = SINK
    cadence = Cadence()

    def __init__(self, path: Path, clock: TurnedClock) -> None:
        self._clock = clock
        self.store = Store(path, [SINK], clock=clock)
        self.told: list[tuple[str, News]] = []
        self.counted: dict[str, int] = {}
        self._courier = Courier(self.store, self, clock)

    def send(self, notice: Notice, *, plain: bool = False) -> Outcome:
        self.told += [(entry.alert.fingerprint, entry.news) for entry in notice.entries]
        self.counted |= notice.counted
        return Sent()

    def deliver(self) -> None:
        """Whatever is due within two minutes."""
        until = self._clock.monotonic() + 120.0
        while (at := self._courier.step()) is not None and at <= until:
            self._clock.turn(max(0.0, at - self._clock.monotonic()))


Start = Callable[[], Agent]


@pytest.fixture
def start(path: Path, clock: TurnedClock) -> Iterator[Start]:
    """Starts an agent over the file."""
    agents: list[Agent] = []

    def make() -> Agent:
        agents.append(Agent(path, clock))
        return agents[-1]

    yield make
    for agent in agents:
        agent.store.close()


@pytest.fixture
def volume(start: Start, path: Path, clock: TurnedClock) -> Volume:
    """It is away, with what an agent left: the sink was told of `told` and `over`, not of the end of `over` and of
    `new`."""
    agent = start()
    told, over, new = (make_alert(name) for name in ("told", "over", "new"))
    agent.store.commit({one.fingerprint: "{}" for one in (told, over)}, [fired(told), fired(over)])
    agent.deliver()
    agent.store.commit({over.fingerprint: None, new.fingerprint: "{}"}, [resolved(over), fired(new)])
    agent.store.add_mute(NIGHT)
    agent.store.close()
    made = Volume(path.parent)
    made.take_away()
    clock.turn(60.0)
    return made


def id_of(name: str) -> str:
    return make_alert(name).fingerprint


def again(name: str, severity: Severity = Severity.WARNING) -> Alert:
    """The same alert, as an agent finds it that does not know that it was told."""
    return make_alert(name, episode=2, started_at=START, severity=severity)


def come_back(agent: Agent, volume: Volume, clock: TurnedClock) -> None:
    volume.bring_back()
    clock.turn(MEND_SECONDS)
    agent.store.commit({}, [])  # an evaluation in which nothing happens


def test_a_file_that_comes_in_the_place_of_ours_is_kept(
    volume: Volume, start: Start, path: Path, clock: TurnedClock
) -> None:
    """A volume that is mounted over the folder in which the agent has begun a file meanwhile."""
    volume.folder.unlink()
    volume.folder.mkdir()
    agent = start()
    assert agent.store.durable
    volume.folder.rename(volume.folder.with_name("below"))
    volume.folder.touch()
    come_back(agent, volume, clock)
    agent.store.commit({"f": "{}"}, [])
    assert agent.store.durable
    aside = path.with_name("alerts.sqlite.aside")
    with closing(sqlite3.connect(aside)) as found:
        assert found.execute("SELECT count(*) FROM mutes").fetchone() == (1,)
    agent.store.close()


def test_nothing_of_it_is_lost(volume: Volume, start: Start, path: Path, clock: TurnedClock) -> None:
    agent = start()
    assert not agent.store.durable
    assert agent.store.mutes() == ()
    come_back(agent, volume, clock)
    assert agent.store.durable
    assert agent.store.mutes() == (NIGHT,)
    assert agent.store.load_states() == {id_of("told"): "{}", id_of("new"): "{}"}
    agent.deliver()
    assert sorted(agent.told) == [(id_of("new"), News.FIRING), (id_of("over"), News.RESOLVED)]
    agent.store.commit({id_of("told"): None}, [resolved(make_alert("told"))])
    agent.deliver()
    assert agent.told[2:] == [(id_of("told"), News.RESOLVED)]
    assert not path.with_name("alerts.sqlite.aside").exists()
    agent.store.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM waiting").fetchone() == (0,)
        assert connection.execute("SELECT count(*) FROM mutes").fetchone() == (1,)
        assert [name for (name,) in connection.execute("SELECT fingerprint FROM states")] == [id_of("new")]


def test_sinks_are_woken_for_what_it_held(volume: Volume, start: Start, clock: TurnedClock) -> None:
    agent = start()
    woken: list[float] = []
    agent.store.on_commit(lambda: woken.append(clock.monotonic()))
    come_back(agent, volume, clock)
    assert woken == [clock.monotonic()]


@pytest.mark.parametrize("severity", [Severity.WARNING, Severity.CRITICAL])
def test_what_still_fires_is_not_told_as_new(
    volume: Volume, start: Start, clock: TurnedClock, severity: Severity
) -> None:
    """Where it was not told again before the file was there; what became worse meanwhile is told as worse."""
    agent = start()
    found = [again("told", severity=severity), again("new", severity=severity), again("over", severity=severity)]
    agent.store.commit({one.fingerprint: "{2}" for one in found}, [fired(one) for one in found])
    come_back(agent, volume, clock)
    agent.deliver()
    news = dict(agent.told)
    assert len(agent.told) == len(news)  # nothing twice
    assert news.get(id_of("told")) == (None if severity is Severity.WARNING else News.ESCALATED)
    assert news[id_of("new")] == News.FIRING
    assert news[id_of("over")] == News.FIRING  # it was over, and fires anew
    assert agent.store.load_states()[id_of("told")] == "{2}"
    agent.store.commit({}, [resolved(one) for one in found])
    agent.deliver()
    assert sorted(agent.told[len(news) :]) == sorted((one.fingerprint, News.RESOLVED) for one in found)
    assert not agent.store.backlog(SINK).told


def test_the_file_s_word_does_not_undo_what_was_told_since(volume: Volume, start: Start, clock: TurnedClock) -> None:
    """`over` fires anew, and that was told: its earlier end must not be told now. `new` came and went."""
    agent = start()
    over, new = again("over"), again("new")
    agent.store.commit({over.fingerprint: "{2}", new.fingerprint: "{2}"}, [fired(over), fired(new)])
    agent.deliver()
    agent.store.commit({new.fingerprint: None}, [resolved(new)])
    agent.deliver()
    before = list(agent.told)
    come_back(agent, volume, clock)
    assert set(agent.store.load_states()) == {id_of("told"), id_of("over")}
    agent.store.commit({}, [fired(make_alert("another"))])
    agent.deliver()
    assert agent.told[len(before) :] == [(id_of("another"), News.FIRING)]
    assert agent.counted == {"pool_nearly_full": 1}  # the firing of `new` that the file had
    assert set(agent.store.backlog(SINK).told) == {id_of("told"), id_of("over"), id_of("another")}


def test_a_message_on_its_way_goes_on(volume: Volume, start: Start, clock: TurnedClock) -> None:
    """The file comes back while a receiver is asked; sequences that the message names stay what they are."""
    agent = start()
    store, over = agent.store, again("over")
    store.commit({over.fingerprint: "{2}"}, [fired(over)])
    backlog = store.backlog(SINK)
    notice = compose(backlog.waiting, backlog.told, at=clock.wall())
    store.begin(SINK, notice)
    come_back(agent, volume, clock)
    store.finish(SINK, notice, group_seconds=60.0)
    backlog = store.backlog(SINK)
    assert [one.change.alert.fingerprint for one in backlog.waiting] == [id_of("new")]
    assert set(backlog.told) == {id_of("told"), id_of("over")}


def test_what_is_damaged_by_then_is_set_aside(volume: Volume, start: Start, path: Path, clock: TurnedClock) -> None:
    agent = start()
    agent.store.commit({}, [fired(make_alert("since"))])
    volume.bring_back()
    path.write_bytes(b"not a database " * 300)
    clock.turn(MEND_SECONDS)
    agent.store.commit({}, [])
    assert agent.store.durable
    assert path.with_name("alerts.sqlite.aside").exists()
    assert [one.change.alert.fingerprint for one in agent.store.backlog(SINK).waiting] == [id_of("since")]


def test_it_is_read_once_and_written_as_often_as_needed(volume: Volume, start: Start, clock: TurnedClock) -> None:
    """A disk that is full when the file is there: what was read from it is not read again, nor doubled."""
    agent = start()
    volume.bring_back()
    clock.turn(MEND_SECONDS)
    write, failures = agent.store._everything, [1, 1]

    def everything() -> object:
        rows = write()
        return replace(rows, states={"half \ud800": "{}"}) if failures and failures.pop() else rows

    agent.store._everything = everything  # type: ignore[method-assign, assignment]
    for _ in range(2):
        agent.store.commit({}, [])
        assert not agent.store.durable
        clock.turn(MEND_SECONDS)
    agent.store.commit({}, [])
    assert agent.store.durable
    agent.deliver()
    assert sorted(agent.told) == [(id_of("new"), News.FIRING), (id_of("over"), News.RESOLVED)]
    assert agent.store.mutes() == (NIGHT,)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE meta SET value = 9223372036854775807",
        "UPDATE waiting SET sequence = 9223372036854775807 WHERE sequence = 4",
    ],
)
def test_a_wild_number_of_the_file_ends_nothing(
    volume: Volume, start: Start, path: Path, clock: TurnedClock, damage: str
) -> None:
    """The next sequence would be one that SQLite does not know."""
    volume.bring_back()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(damage)
        connection.commit()
    for name in ("x", "y"):
        agent = start()
        agent.store.commit({name: "{}"}, [fired(make_alert(name))])
        assert agent.store.durable
        agent.store.close()
    agent = start()
    agent.deliver()
    assert sorted(agent.told) == sorted(
        [*((id_of(name), News.FIRING) for name in ("new", "x", "y")), (id_of("over"), News.RESOLVED)]
    )


@pytest.mark.parametrize("table", ["mutes", "states"])
def test_a_row_of_nested_text_costs_itself_alone(table: str, start: Start, path: Path) -> None:
    agent = start()
    agent.store.add_mute(NIGHT)
    agent.store.close()
    with closing(sqlite3.connect(path)) as file:
        file.execute(f"INSERT INTO {table} VALUES ('zz', ?)", ("[" * 100_000,))  # noqa: S608 - ours
        file.commit()
    again = start()
    assert again.store.durable
    assert again.store.mutes() == (NIGHT,)
    if table == "states":
        with pytest.raises(StateUnreadable):
            AlertState.from_json(again.store.load_states()["zz"])


def test_a_damaged_schema_sets_the_file_aside(start: Start, path: Path) -> None:
    agent = start()
    agent.store.close()
    damaged = path.read_bytes().replace(b"since REAL", b"sincf REAL")
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    again = start()
    again.store.commit({"f": "{}"}, [fired(make_alert("a"))])
    assert again.store.durable
    assert path.with_name("alerts.sqlite.aside").exists()
