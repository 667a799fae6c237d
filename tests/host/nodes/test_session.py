"""The thread that follows the rules of a rendezvous: what it does when the service behind it refuses."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ftrun.core.errors import EXIT_FAILED, EXIT_USAGE
from ftrun.host.nodes.carriers.carrier import Denied, Record
from ftrun.host.nodes.membership.member import News
from ftrun.host.nodes.membership.session import Session
from ftrun.host.nodes.membership.terms import Me, MemberTerms
from tests.conftest import wait_for
from tests.host.nodes.test_membership import Memory

KEEP_ALIVE = 1.0


class Refusing(Memory):
    """Records of a service that refuses while `refuses`."""

    serves = False
    refuses = False
    looks = refused = 0

    def view(self) -> Mapping[str, Record]:
        if self.refuses:
            self.refused += 1
            raise Denied("the service refuses GET: no such role")
        self.looks += 1
        return super().view()


def begin(records: Refusing) -> tuple[Session, list[News]]:
    heard: list[News] = []
    terms = MemberTerms(2, 2, keep_alive=KEEP_ALIVE, beat=0.1)
    session = Session(lambda *_: (records, Me("a", "host-a", "127.0.0.1", 2)), terms, 0.02, heard.append, lambda begun: None)
    session.start()
    return session, heard


def test_a_service_that_refuses_at_first_ends_it_at_once() -> None:
    records = Refusing()
    records.refuses = True
    session, heard = begin(records)
    wait_for(lambda: bool(heard), "the end")
    assert heard[0].kind == "lost" and (heard[0].record or {})["code"] == EXIT_USAGE
    session.close()


@pytest.mark.parametrize("for_good", [False, True])
def test_one_that_refuses_later_may_change_its_mind(for_good: bool) -> None:
    records = Refusing()
    session, heard = begin(records)
    wait_for(lambda: records.looks > 1, "a look")
    records.refuses = True
    wait_for(lambda: records.refused > 3, "refusals")
    assert [news.kind for news in heard] == ["waiting"]
    if for_good:
        wait_for(lambda: len(heard) > 1, "the end")
        assert heard[1].kind == "lost" and (heard[1].record or {})["code"] == EXIT_FAILED
        assert "cannot be reached: the service refuses GET: no such role" in (heard[1].record or {})["detail"]
    else:
        records.refuses = False
        before = records.looks
        wait_for(lambda: records.looks > before + 3, "further looks")
        assert len(heard) == 1
    session.close()
