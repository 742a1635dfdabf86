"""Rounds of the direct exchange: who is in one, when it begins, and whether it counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bigtrain.sites.protocol import (
    HEARTBEAT_TIMEOUT,
    GetRequest,
    LayoutOfRequest,
    RefusedError,
    digest_of,
)
from tests.unit.sites.server.direct_run import (
    LAST_STEP,
    LAYOUT,
    WINDOW,
    DirectRun,
    Site,
    begin,
    enter,
    finish,
    join,
    make_round,
    request,
    vote,
)

NOTHING = memoryview(b"")


@pytest.fixture
def run(tmp_path: Path) -> DirectRun:
    return DirectRun(tmp_path)


def told(plan: Any) -> set[tuple[str, str, str]]:
    return {(event.event, event.who, event.reason) for event in plan.events}


def test_a_new_run_begins_with_all_sites_and_makes_rounds(run: DirectRun) -> None:
    sites = [Site(run, index) for index in range(3)]
    join(sites[:2])
    run.pass_time(10 * WINDOW, *sites[:2])  # no window here: all must come
    assert sites[0].poll() == {
        "is_ready": False,
        "missing": [2],
        "refused": {},
        "is_new": True,
    }
    sites[2].join()
    sites[2].enter(None)
    plan = finish(sites)
    assert (plan.number, plan.fragment, plan.takers, plan.weights) == (0, None, (), (0, 0, 0))
    for number in (1, 2):
        for site, tokens in zip(sites, (200, 100, 300), strict=True):
            site.enter(tokens=tokens)
        plan = finish(sites)
        assert (plan.number, plan.members, plan.weights) == (number, (0, 1, 2), (2, 1, 3))
        assert (plan.takers, plan.donor, plan.sites) == ((), 0, (0, 1, 2))
        assert plan.tokens_seen == 600 * number
        assert not plan.events
    assert "outer step 2 with site 0, 1, 2" in run.said
    state = request(run.state, "wait", site=0, run="0" * 16, base=1, seconds=0)
    assert (state["number"], state["sites"], state["tokens"]["2"]) == (2, [0, 1, 2], 300)


def test_weights_of_a_new_run_that_differ_are_named_and_nothing_begins(run: DirectRun) -> None:
    sites = [Site(run, index) for index in range(3)]
    sites[1].digest = "f" * 16
    join(sites)
    plan = sites[0].plan()
    digests = f"({'0' * 16} at site 0, {'f' * 16} at site 1, {'0' * 16} at site 2)"
    assert f"sites of a new run begin with different global weights {digests}" in plan.refusal
    sites[0].vote(plan.attempt)
    assert sites[0].verdict(plan.attempt) is False
    assert run.state.store.record() is None
    sites[1].digest = "0" * 16
    join(sites)
    assert not finish(sites).refusal


def test_requests_that_come_again_change_nothing(run: DirectRun) -> None:
    sites = begin(run)
    for site in sites:
        site.enter()
        site.ask("enter", **site.entered())  # its reply was lost
    plan = sites[0].plan()
    for site in sites:
        site.ask("enter", **site.entered())  # it has its plan, and the reply was lost
        assert site.plan() == plan
    for site in sites:
        site.vote(plan.attempt)
        site.vote(plan.attempt, is_done=False)  # the first one counts
    for site in sites:
        site.vote(plan.attempt, is_done=False)
        site.ask("enter", **site.entered())
        assert site.verdict(plan.attempt) is True
        assert site.plan() == plan
        site.take(plan)
    assert make_round(sites).number == 2


def test_a_site_that_is_lost_is_not_waited_for_and_its_round_fails(run: DirectRun) -> None:
    sites = begin(run)
    enter(sites)
    plan = sites[0].plan()
    vote(sites[:2], plan)
    run.pass_time(HEARTBEAT_TIMEOUT - 1, *sites[:2])
    assert sites[0].verdict(plan.attempt) is None
    run.pass_time(2, *sites[:2])
    assert [site.verdict(plan.attempt) for site in sites[:2]] == [False, False]
    enter(sites[:2])
    again = finish(sites[:2])
    assert (again.number, again.members) == (1, (0, 1))
    assert again.generation != plan.generation
    assert told(again) == {("site_left_out", "site 2", "was lost during the exchange")}
    # Two make rounds without waiting for it; back, it takes their weights.
    assert make_round(sites[:2]).number == 2
    run.now += 1
    sites[2].enter()
    enter(sites[:2])
    plan = finish(sites)
    assert (plan.number, plan.takers, plan.weights) == (3, (2,), (1, 1, 0))
    assert told(plan) == {("site_returned", "site 2", "takes the global weights")}
    assert not make_round(sites).takers


def test_a_window_ends_for_a_slow_site_which_takes_the_weights_later(run: DirectRun) -> None:
    sites = begin(run)
    enter(sites[:2])
    assert sites[0].poll()["missing"] == [2]
    run.pass_time(WINDOW - 1, *sites)
    assert not sites[0].poll()["is_ready"]
    run.pass_time(1, *sites)
    plan = finish(sites[:2])
    assert told(plan) == {("site_left_out", "site 2", "missed the outer step")}
    assert make_round(sites[:2]).number == 2  # not waited for a second time
    sites[2].enter()  # behind: it does not start a window
    run.pass_time(3 * WINDOW, *sites)
    assert not sites[2].poll()["is_ready"]
    enter(sites[:2])
    assert finish(sites).takers == (2,)


def test_a_site_that_begins_later_waits_for_the_next_round_of_the_others(run: DirectRun) -> None:
    sites = begin(run)
    make_round(sites)
    back = Site(run, 2)  # started again without a checkpoint
    back.run_id = sites[2].run_id
    back.join()
    back.enter(None)
    run.pass_time(5 * WINDOW, *sites)
    assert back.poll()["missing"] == [0, 1]
    enter(sites[:2])
    plan = finish([*sites[:2], back])
    assert (plan.number, plan.takers, plan.donor) == (2, (2,), 0)


def test_sites_that_resume_wait_for_all_for_a_window_and_the_best_weights_stay(
    run: DirectRun,
) -> None:
    make_round(begin(run))
    run.restart()
    older, newer = Site(run, 0, number=1, seen=300), Site(run, 1, number=2, seen=900)
    join((older, newer))
    run.pass_time(WINDOW - 1, older, newer)
    assert not newer.poll()["is_ready"]
    run.pass_time(1, older, newer)
    plan = finish([older, newer])
    assert (plan.number, plan.fragment, plan.takers, plan.donor) == (2, None, (0,), 1)
    assert make_round([older, newer]).number == 3


def test_all_sites_from_older_checkpoints_continue_where_they_are(run: DirectRun) -> None:
    sites = begin(run)
    for _ in range(3):
        make_round(sites)
    old = [Site(run, index, number=1, seen=300) for index in range(3)]
    join(old)
    # A number names one set of weights: 1 and 2 were others.
    assert finish(old).number == 4
    text = "outer step 3 is on none of the sites that are here: they continue from 1, which becomes"
    assert run.said.count(f"{text} 4") == 1
    assert make_round(old).number == 5
    assert request(run.state, "wait", site=0, run="0" * 16, base=0, seconds=0)["number"] == 5


@pytest.mark.parametrize(
    ("ended", "back", "is_refused"),
    [
        ([0, 1, 2], [2], True),  # killed before it had saved the last outer step
        ([0, 1], [2], True),  # missed it
        ([0, 1], [1, 2], True),
        ([0, 1, 2], [0, 1, 2], False),  # nobody has its weights any more
        ([1], [1], False),
        ([1], [0, 1, 2], False),
    ],
)
def test_sites_continue_after_the_end_only_if_it_is_lost_on_all_its_sites(
    ended: list[int], back: list[int], is_refused: bool, run: DirectRun
) -> None:
    sites = begin(run)
    assert make_round(sites).ended_step == 0
    for site in sites:
        site.step = LAST_STEP
    for index in ended:
        sites[index].enter()
    run.pass_time(WINDOW, *(sites[index] for index in ended))
    plan = finish([sites[index] for index in ended])
    assert (plan.number, plan.ended_step) == (2, LAST_STEP)
    for site in sites:
        site.ask("leave")
    run.restart()
    older = [Site(run, index, number=1, seen=300) for index in back]
    join(older)
    run.pass_time(WINDOW, *older)
    if not is_refused:
        assert finish(older).number == 3
        assert make_round(older).number == 4
        return
    away = ", ".join(str(index) for index in ended if index not in back)
    text = f"the run ended with outer step 2, after its last step {LAST_STEP}, on site {away}, and"
    for site in older:
        assert site.plan().refusal.startswith(text)
        site.vote(site.plan().attempt)
        assert site.verdict(site.plan().attempt) is False
    record = run.state.store.record()
    assert record is not None
    assert record["number"] == 2


def test_weights_with_which_the_run_ended_stay_those_of_the_end(run: DirectRun) -> None:
    """A restart of the sites that have them, and of one without them."""
    sites = begin(run)
    sites[0].step = LAST_STEP
    assert make_round(sites).ended_step == 0  # not all of them are at their end
    for site in sites:
        site.step = LAST_STEP
    plan = make_round(sites)
    assert plan.ended_step == LAST_STEP
    sites[2].number, sites[2].tokens_seen, sites[2].digest = 0, 0, "0" * 16
    join(sites)
    plan = finish(sites)
    assert (plan.number, plan.takers, plan.ended_step) == (2, (2,), LAST_STEP)


def test_a_failed_vote_aborts_and_a_commit_stays_through_restarts(run: DirectRun) -> None:
    sites = begin(run)
    enter(sites)
    plan = sites[0].plan()
    sites[0].vote(plan.attempt, is_done=False)
    assert sites[0].verdict(plan.attempt) is None  # who has sent bad values is not known yet
    vote(sites[1:], plan)
    assert {site.verdict(plan.attempt) for site in sites} == {False}
    plan = make_round(sites)
    enter(sites)
    open_plan = sites[0].plan()
    for site in sites[1:]:
        site.vote(open_plan.attempt)
    run.restart()
    for site in sites:
        assert site.verdict(plan.attempt) is True
        assert site.verdict(open_plan.attempt) is False
        site.vote(open_plan.attempt)  # too late
        assert site.verdict(open_plan.attempt) is False
    for site in sites:
        site.poll()  # enters again
    assert finish(sites).number == 2


def test_no_vote_in_time_and_a_new_entry_of_a_member_abort(run: DirectRun) -> None:
    sites = begin(run)
    enter(sites)
    plan = sites[0].plan()
    sites[0].vote(plan.attempt)
    run.pass_time(59, *sites)
    assert sites[0].verdict(plan.attempt) is None
    run.pass_time(1, *sites)
    assert sites[0].verdict(plan.attempt) is False
    enter(sites)
    plan = sites[0].plan()
    vote(sites[:2], plan)
    sites[2].join()  # started again meanwhile
    assert sites[0].verdict(plan.attempt) is False
    enter(sites[:2])
    sites[2].enter(None)
    assert finish(sites).takers == (2,)


def test_a_site_blamed_for_its_values_is_refused_until_it_joins_again(run: DirectRun) -> None:
    sites = begin(run)
    enter(sites)
    plan = sites[0].plan()
    sites[0].vote(plan.attempt, is_done=False)
    sites[2].vote(plan.attempt)
    sites[1].vote(plan.attempt, is_done=False, unusable=2)
    assert sites[0].verdict(plan.attempt) is False
    with pytest.raises(RefusedError, match="site 2 sent values that are not finite, or moved too"):
        sites[2].enter()
    run.state.tick()
    run.restart()
    with pytest.raises(RefusedError, match="site 2 sent values that are not finite"):
        sites[2].poll()
    enter(sites[:2])
    plan = finish(sites[:2])
    text = "sent values that are not finite, or moved too far"
    assert told(plan) == {("site_left_out", "site 2", text)}
    sites[2].join()
    sites[2].enter(None)
    enter(sites[:2])
    assert finish(sites).takers == (2,)


def test_sites_that_cannot_reach_each_other_are_left_out_one_by_one(run: DirectRun) -> None:
    """Two failures with all of them there; then longer each time."""
    sites = begin(run)
    rounds = []
    for _ in range(14):
        for site in sites:
            if site.poll()["is_ready"]:  # else it waits
                site.enter()
        plan = sites[0].plan()
        rounds.append(plan.members)
        members = [sites[index] for index in plan.members]
        for site in members:
            site.vote(plan.attempt, is_done=2 not in plan.members or site.index == 0)
        for site in members:
            if site.verdict(plan.attempt):
                site.take(plan)
    everyone, two = (0, 1, 2), (0, 1)
    assert rounds[:5] == [everyone, everyone, two, two, everyone]
    assert rounds[5:12] == [everyone, two, two, two, two, everyone, everyone]


def test_values_of_a_handshake_are_of_a_generation(run: DirectRun) -> None:
    sites = begin(run)
    enter(sites)
    generation = sites[0].plan().generation
    assert sites[1].ask("get", generation=generation, key="a", seconds=0) == {"is_there": False}
    sites[0].ask("put", b"address", generation=generation, key="a")
    header = {"site": 1, "run": sites[1].run_id, "generation": generation, "key": "a", "seconds": 0}
    reply, value = run.state.act("get", GetRequest(**header), NOTHING)
    assert (reply, value) == ({"is_there": True}, b"address")
    finish(sites)
    assert make_round(sites).generation == generation  # the same members, who have their groups
    with pytest.raises(RefusedError, match="65537 bytes"):
        sites[0].ask("put", bytes((64 << 10) + 1), generation=generation, key="b")
    for number in range(1023):
        sites[0].ask("put", bytes(64 << 10), generation=generation, key=str(number))
    with pytest.raises(RefusedError, match="more than 67108864 bytes of values"):
        sites[0].ask("put", bytes(64 << 10), generation=generation, key="last")
    sites[1].join()
    sites[1].enter(None)
    enter((sites[0], sites[2]))
    assert sites[0].plan().generation != generation
    with pytest.raises(RefusedError, match="the round of this generation is over"):
        sites[0].ask("get", generation=generation, key="a", seconds=0)


@pytest.mark.parametrize("how", ["votes", "joins", "enters", "leaves", "silent"])
def test_a_handshake_with_a_site_that_is_lost_ends_at_once(how: str, run: DirectRun) -> None:
    """The others would wait for its addresses until their own time limit."""
    sites = begin(run)
    enter(sites)
    plan = sites[0].plan()
    asked = {"generation": plan.generation, "key": "address of 2", "seconds": 0}
    assert not sites[0].ask("get", **asked)["is_there"]
    if how == "votes":
        sites[2].vote(plan.attempt, is_done=False)
    elif how == "joins":
        sites[2].join()
    elif how == "enters":
        sites[2].enter()
    elif how == "leaves":
        sites[2].ask("leave")
    else:
        run.pass_time(HEARTBEAT_TIMEOUT, *sites[:2])
    with pytest.raises(RefusedError, match="the round of this generation is over"):
        sites[0].ask("get", **asked)


def test_layouts_are_kept_by_their_digest(run: DirectRun) -> None:
    first, second = Site(run, 0), Site(run, 1)
    assert first.join()["needs_layout"]
    assert not second.join()["needs_layout"]  # the same one
    header = {"site": 1, "run": second.run_id, "of_site": 0}
    assert run.state.act("layout_of", LayoutOfRequest(**header), NOTHING) == ({}, LAYOUT)
    other = Site(run, 2)
    with pytest.raises(RefusedError, match="site 2 has not joined"):
        first.ask("layout_of", of_site=2)
    other.join()
    # What a site sends in float32 changes its rectangles: a later document replaces the first.
    document = b'{"ranks": 2}'
    other.ask("layout", document)
    place = {"site": 0, "run": first.run_id, "of_site": 2}
    assert run.state.act("layout_of", LayoutOfRequest(**place), NOTHING) == ({}, document)
    for site in (first, second, other):
        site.enter(None)
    digests = [digest_of(LAYOUT)] * 2 + [digest_of(document)]
    assert list(first.plan().layouts.values()) == digests
    run.restart()
    assert not first.join()["needs_layout"]


def test_names_in_float32_are_those_of_all_sites(run: DirectRun) -> None:
    sites = [Site(run, index) for index in range(3)]
    for site, plain in zip(sites, (["a"], [], ["b", "a"]), strict=True):
        site.join(plain=plain)
        site.enter(None)
    assert sites[0].plan().plain == ("a", "b")


def test_requests_of_the_other_exchange_and_of_strangers_are_refused(tmp_path: Path) -> None:
    run = DirectRun(tmp_path / "direct")
    site = Site(run, 0)
    with pytest.raises(RefusedError, match="no site has joined yet"):
        site.enter()
    site.join()
    with pytest.raises(RefusedError, match=r"sites\.exchange: 'direct' there, 'server' here"):
        Site(run, 1).join(exchange="server")
    with pytest.raises(RefusedError, match="site 1 has not joined"):
        Site(run, 1).enter()
    with pytest.raises(RefusedError, match=r"sites\.count = 3 has 0 to 2"):
        Site(run, 7).enter()
    with pytest.raises(RefusedError, match=r"sites\.exchange = direct, not server"):
        site.ask("uploaded")
    second = Site(run, 0)
    second.run_id = "f" * 16
    for refused in (second.join, second.enter):
        with pytest.raises(RefusedError, match="another run directory"):
            refused()


def test_a_full_disk_delays_the_verdict(run: DirectRun, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = begin(run)
    enter(sites)
    plan = sites[0].plan()
    store = run.state.store

    def full() -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store, "_commit", full)
        for site in sites:
            site.vote(plan.attempt)
        run.pass_time(10 * HEARTBEAT_TIMEOUT)  # also of nobody's heartbeat any longer
        assert sites[0].verdict(plan.attempt) is None
    run.state.tick()
    assert {site.verdict(plan.attempt) for site in sites} == {True}
    assert sum("No space left" in line for line in run.said) == 1


def test_a_run_is_over_when_all_have_left_or_nobody_is_heard_of(run: DirectRun) -> None:
    members = run.state
    assert not members.is_over(10)
    sites = begin(run)
    for site in sites:
        assert not members.is_over(10)
        site.ask("leave")
    assert members.is_over(10)
    sites[0].join()
    assert not members.is_over(10)
    run.pass_time(10, sites[0])
    assert not members.is_over(10)
    run.pass_time(10)
    assert members.is_over(10)
    # A server that is started again with this directory waits for sites to join.
    run.restart()
    assert not run.state.is_over(10)
