"""What the loop of a script changes is kept with the step, without a word in the script.

A value that has changed since the loop began, or that the loop is seen to carry from one iteration to the next, is copied into every
slot from then on, and put back in place in a replacement and in a survivor that does the step again. Which ones that are is looked for
as a whole in the bodies that are looked at; in between each name that is bound to another thing is found by one comparison of
identities. What never changed is the replacement's own: its script makes it. What cannot be kept (an iterator, a file, what is too
large) is for the search for what was left out to name.
"""

from __future__ import annotations

import hashlib
import operator
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ftrun.worker.link.callers import outside
from ftrun.worker.state import spaces
from ftrun.worker.state.bindings import BEHIND, Bindings, Named, put_back, put_back_as_it_stood, shared, together
from ftrun.worker.state.copies import Copied, TooLarge, copied, placed
from ftrun.worker.state.guarded_memory import GuardedMemory
from ftrun.worker.state.histories import LARGEST, Histories, whole
from ftrun.worker.state.in_place import InPlace
from ftrun.worker.state.spaces import Space
from ftrun.worker.state.value_places import ValuePlaces, is_under
from ftrun.worker.torch_compat.frames_private import dict_of_locals

PREFIX = "variable "  # of a name among what slots keep of the Python state
WHOLE = PREFIX + "whole"  # of which objects there are copies, and not of what they hold
_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))
_NEW = object()
_BESIDE = "\n"  # between names that are kept together
# what is at its place in every process, and holds nothing that a loop changes
_HARMLESS = frozenset(
    "function builtin_function_or_method builtin_method method type module code lock RLock _thread.lock object weakref ReferenceType "
    "DataLoader ProcessGroup SwapGroup DeviceMesh Thread Condition StreamHandler FileHandler Stream frame".split()
)


_TURN = 24  # spaces whose names are looked at in each step, beside those of the loop's own functions and modules


class Variables:
    """Of one rank.

    Args:
        modules: The protected ones.
        known: Name -> thing of what the job keeps itself: it is bound, and not copied.
        ignored: Names, and things, that are to stay out.
        only: Names, of variables or `self.meters`, that alone are kept; None = all.
        memory: What the job guards.
    """

    def __init__(
        self,
        modules: list[torch.nn.Module],
        known: Mapping[str, Any],
        ignored: Iterable[Any] = (),
        only: Iterable[str] | None = None,
        memory: GuardedMemory | None = None,
    ) -> None:
        self.memory = memory
        self.ignored = frozenset(name for name in ignored if isinstance(name, str))
        self.loop: object = None  # the one that is left by `leave`, for who has several
        self.told: Callable[[Iterable[str]], None] = lambda names: None  # hears the names of what is lost
        self.histories = Histories(memory)
        self._at = ValuePlaces(modules, known, ignored, only)
        self._all = self._at if only is None else ValuePlaces(modules, known, ignored, None)  # for who names what is not kept
        self._stands: dict[str, Any] = {}  # place -> what stood for its value at the last look
        self.retains = False  # may all ranks go back to a step in which less had changed?
        self._first: dict[str, Any] = {}  # what stood for a value before it changed
        self._things: dict[str, int] = {}  # and its id: an equal one may be a part of something else
        self._kept: dict[str, Named] = {}  # those that changed
        self._wanted: set[str] = set()  # those that a predecessor kept
        self._beside: dict[str, list[str]] = {}  # kept -> those that hold a part of the same thing, itself among them
        self._parts: dict[int, str] = {}  # id of what a value holds -> the name it was found under, at the last look
        self._together: dict[int, set[str]] = {}  # id of what several names hold, at the last look -> those
        self._had_steps = False
        self._in_body = False  # a step was handed out; what is kept together stays so until the next is
        self._due = False  # may more be to be kept together then?
        self.as_before: dict[str, bytes] | None = None  # what `capture` gave, had no more been kept together than at the one before
        self._bound: dict[str, int] = {}  # kept -> id of its value at the last look
        self._met: list[tuple[Named, Copied]] | None = None  # copies that a look has made
        self._left: dict[str, str] = {}  # place as a person reads it -> why it is not kept
        self._since: dict[str, bool] = {}  # what was seen to change since a step was handed out: was it there before?
        self._at_start: list[Bindings] = []  # when it was
        self._held: dict[str, bytes] = {}  # place -> a copy from then of what no slot has, where the step may be begun once more
        self._watched: list[Bindings] = []
        self._in_turn: list[Bindings] = []
        self._turn = 0

    # -- what stands for a value -------------------------------------------------------------------------------------

    def passes_over(self, iterated: set[int]) -> None:
        """`iterated`: ids of loaders and samplers that are kept with the place in the data; it grows."""
        self._at.iterated = self._all.iterated = iterated

    def here(self) -> None:
        """The loop is about to give something to the script, in whose frames it is called."""
        self._in_body = False
        if self._at.only is not None and not self._at.only:
            return
        frames = self._at.frames
        if (not frames or outside() is not frames[0]) and self._at.come():
            self.look()  # a loop before this one, or what was between the two, may have changed something

    def leave(self) -> None:
        """A loop is over: the frames it was in may end."""
        self._at.leave()
        self._all.leave()
        self._watched, self._in_turn, self._kept, self._at_start = [], [], {}, []
        self._bound, self._beside = {}, {}
        self.histories.let_go()

    def _stand(self, place: Named, value: Any) -> Any:
        """Something that is equal as long as the value is; None for what is not kept. A copy where it may be needed, else small."""
        if type(value) in _ATOMS:
            return type(value).__name__, value
        name = self._at.by_id.get(id(value))
        if name is not None:
            return (name,)
        if self._at.is_passed_over(value):
            return None
        data = self._copy(place, value)
        return data if data is None or self.retains else hashlib.blake2b(data, digest_size=16).digest()

    def _copy(self, place: Named, value: Any, kept_as: str = "") -> bytes | None:
        """`kept_as`: the name under which a slot has it; "" = the copy only stands for the value."""
        if type(value) in _ATOMS:
            return pickle.dumps(value, 5)
        why = ""
        try:
            if _size(value) > LARGEST and (self.memory is None or self.memory.over(value) is None):
                raise TooLarge
            made = self.histories.copied(kept_as or place.key, value, self._at.by_id, bool(kept_as), self._met is not None)
        except TooLarge:
            why = f"larger than {LARGEST >> 20} MB"
        except Exception as error:  # the script's own code, too
            why = f"{type(error).__name__}: {error}"
        else:
            held = [kind for kind in made.left if kind not in _HARMLESS]
            verb = "is" if held and held[0] == type(value).__qualname__ else "holds"
            why = "has a cache" if hasattr(type(value), "cache_info") else f"{verb} a {held[0]}" if held else ""
            if not why:
                self._left.pop(place.shown, None)
                if self._met is not None:
                    self._met.append((place, made))
                return made.data
        self._left[place.shown] = why
        return None

    # -- what changed ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Remember which things the names are bound to."""
        self._watched, self._in_turn = [], []
        for space in self._at.spaces:
            bindings = self._bindings_of(space)
            if bindings is not None:
                often = space.frame is not None or space.owner is None
                (self._watched if often else self._in_turn).append(bindings)

    def _bindings_of(self, space: Space) -> Bindings | None:
        """None of a class or a closure: they are looked at as a whole."""
        if space.raw is None and space.frame is None:
            return None
        values = space.read()
        names = [name for name in values if self._at.counts(space, name) and Named(space, name).key not in self._kept]
        if not names:
            return None
        get: Any = operator.itemgetter(*names, names[0])  # of one name it would give no tuple
        raw = space.raw if space.raw is not None else values
        return Bindings(space, names, get, get(raw), len(raw), dict_of_locals(space.frame) if space.frame else None)

    def _is_elsewhere(self, bindings: Bindings, now: Any) -> bool:
        """Look at names that are bound anew. True: an object of the script's is, so what it holds is to be found."""
        space = bindings.space
        for name, value, before in zip(bindings.names, now, bindings.before, strict=False):
            if value is before:
                continue
            place = Named(space, name)
            leads_on = id(value) not in self._at.by_id and spaces.is_open(value)
            if leads_on and space.key + name not in self._at.whole:
                self._at.whole.add(space.key + name)
                return True
            if place.shown not in self._left:
                self._compare(place, value)
                if place.key in self._kept and type(value) not in _ATOMS:
                    return True  # it may hold a part of what others hold
        renewed = self._bindings_of(space)
        for each in (self._watched, self._in_turn):
            if bindings in each:
                each[each.index(bindings)] = renewed or bindings._replace(before=now)
        return False

    def _compare(self, place: Named, value: Any) -> None:
        """Is that another value than at the last look, or another thing? Then it is kept from here on."""
        stand, before = self._stand(place, value), self._stands.get(place.key, _NEW)
        is_same = self._things.get(place.key) == id(value) or not isinstance(stand, bytes) or type(value) is tuple
        if stand == before and is_same:
            return
        self._stands[place.key], self._things[place.key] = stand, id(value)
        self._first.setdefault(place.key, before)
        if stand is not None:
            self._kept[place.key] = place
            self._wanted.add(place.key)
            self._since.setdefault(place.shown, before is not _NEW)

    def look(self) -> None:
        """Look at everything: what changed since the last look is kept from here on."""
        if not self._at.frames:
            return
        before = {*self._at.roots}
        self._at.find()
        self._kept, self._bound, self._met = {}, {}, []
        for place, value in self._at.values():
            if place.shown in self._at.carried and place.key not in self._wanted and self._is_plain(place, value):
                # not changed yet, and maybe another one in a replacement: from a checkpoint that was written meanwhile
                self._wanted.add(place.key)
                if self.retains:
                    self._first.setdefault(place.key, self._stand(place, value))
            if place.key in self._wanted:
                self._kept[place.key] = place
                if type(value) not in _ATOMS:
                    self._bound[place.key] = id(value)
                    self._copy(place, value, "" if place.key in self._beside else place.key)
            elif place.space.root not in before:  # a function or module that is new is taken as it is found
                self._stands[place.key], self._things[place.key] = self._stand(place, value), id(value)
            else:
                self._compare(place, value)
        self._due = self._in_body
        held = {place.key: made.held() for place, made in self._met}
        self._together = together(held)
        if not self._in_body:
            self._find_shared({place.key: place for place, _ in self._met}, held)
        self._met = None  # ids of what it held are good as long as it is
        self._watch()

    def _is_plain(self, place: Named, value: Any) -> bool:
        """Is that a value, and no object whose attributes are looked at by themselves, nor nothing yet?"""
        return value is not None and id(value) not in self._at.by_id and not spaces.is_open(value) and self._stand(place, value) is not None

    def _find_shared(self, places: Mapping[str, Named], held: Mapping[str, Iterable[int]]) -> None:
        """What two names hold a part of is one thing, also in a replacement: they are kept together, once one of them changed."""
        self._parts, groups = shared(held, self._beside.values())
        self._beside = {}
        for names in groups:
            if not self._kept.keys().isdisjoint(names):
                self._beside |= dict.fromkeys(names, names)
                self._kept |= {name: places[name] for name in names}
                self._wanted.update(names)

    def capture(self, whole: bool) -> dict[str, bytes]:
        """What changed since the loop began, for a slot.

        `whole`: everything is looked at; else what names are bound to, which is counted in a step: hence without a call.
        """
        if not self._at.frames:
            return {}
        first, self._turn = self._turn, self._turn + _TURN
        if self._turn >= len(self._in_turn):
            self._turn = 0
        for bindings in () if whole else self._watched + self._in_turn[first : first + _TURN]:
            space, _, get, before, length, found = bindings
            theirs = found.copy() if found else {}
            now: Any = space.raw if space.frame is None else space.frame.f_locals
            try:
                now = get(now) if len(now) == length else None
            except KeyError:
                now = None
            if found is not None:  # `frames_private.leave`, without a call
                found.clear()
                found.update(theirs)
            if now is None or (not all(map(operator.is_, now, before)) and self._is_elsewhere(bindings, now)):
                whole = True  # there are new names, or other objects
                break
        before = self._beside
        self.as_before = None
        if whole or (not self._in_body and (self._due or (self._bound and self._is_a_part_by_now()))):
            self.look()
        if before != self._beside:
            after, self._beside = self._beside, before
            self.as_before, self._beside = self._copies(), after
        return self._copies() if self._kept or self._at.whole else {}

    def _copies(self) -> dict[str, bytes]:
        state: dict[str, bytes] = {WHOLE: pickle.dumps(sorted(self._at.whole), 5)} if self._at.whole else {}
        read: dict[str, Mapping[str, Any]] = {}
        together: dict[int, list[str]] = {}
        for key, (space, name) in self._kept.items():
            values = read.get(space.key)
            if values is None:
                values = read[space.key] = space.read()
            if key in self._beside:
                together.setdefault(id(self._beside[key]), self._beside[key])
            elif name in values:
                value = values[name]
                data = pickle.dumps(value, 5) if type(value) in _ATOMS else self._copy(Named(space, name), value, key)
                if data is not None:
                    state[PREFIX + key] = data
        for keys in together.values():
            self._add_together(keys, state)
        return state

    def _is_a_part_by_now(self) -> bool:
        """Is something that is kept bound to another thing, which was a part of something else at the last look?"""
        read: dict[str, Mapping[str, Any]] = {}
        for key, before in self._bound.items():
            space, name = self._kept[key]
            values = read.get(space.key)
            if values is None:
                values = read[space.key] = space.read()
            mark = id(values.get(name))
            if mark != before and self._parts.get(mark, key) != key and self._holds(self._parts.pop(mark), mark):
                return True
        return False

    def _holds(self, key: str, mark: int) -> bool:
        """Does the value of that name hold the thing of that id, which was another's when it was found there, maybe?"""
        for place, value in self._at.values():
            if place.key == key:
                return mark in copied(value, self._at.by_id, LARGEST, self.memory).held()
        return False

    def _add_together(self, keys: list[str], state: dict[str, bytes]) -> None:
        """Names that hold parts of the same thing, in one copy."""
        places = [self._kept[key] for key in keys if key in self._kept]
        there = [(place, now[place.name]) for place in places if place.name in (now := place.space.read())]
        values = [value for _, value in there]
        key = _BESIDE.join(place.key for place, _ in there)
        data = self._copy(there[0][0], tuple(values) if len(values) > 1 else values[0], key) if there else None
        if data is not None:
            state[PREFIX + key] = data
        elif there:
            self._left |= dict.fromkeys([place.shown for place, _ in there], self._left[there[0][0].shown])

    # -- putting back ------------------------------------------------------------------------------------------------

    def put_back(self, saved: Mapping[str, bytes], is_all: bool = True) -> None:
        """Put back what `capture` gave, here or in a predecessor, or a part of that; what cannot be is lost."""
        wanted = {key.removeprefix(PREFIX): data for key, data in saved.items() if key.startswith(PREFIX)}
        bound_anew = wanted.pop(WHOLE.removeprefix(PREFIX), None)
        is_all = is_all and self.retains
        if not wanted and not (is_all and self._kept):
            return
        if bound_anew is not None and self._at.frames:
            self._at.whole |= set(placed(None, bound_anew, {}))
            self._at.find()
        self._wanted.update(name for key in wanted for name in key.split(_BESIDE))
        by_key = {space.key: space for space in self._at.spaces}
        things = self._at.things()
        lost = []
        in_place = InPlace(self.memory)
        by_name = {id(thing) for thing in things.values()}
        for key, data in wanted.items():
            names = key.split(_BESIDE)
            # in a replacement: what its script has made of one thing its predecessor may have had as several by then
            apart = {} if self._had_steps else self._together
            in_place.apart = by_name | {mark for mark, holders in apart.items() if not holders <= {*names}}
            parts = [name.rpartition(BEHIND) for name in names]
            places = [Named(by_key[where], name) for where, _, name in parts if where in by_key]
            if len(places) < len(parts):
                lost.append(self.shown(key))
                continue
            self.histories.let_go(key)
            try:
                put_back(places, whole(data, self.histories.logs), things, in_place)
            except Exception as error:  # CannotPlace, or what the script's own setter raises
                self._left |= dict.fromkeys([place.shown for place in places], str(error))
                lost += [place.shown for place in places]
                continue
            self._kept |= {place.key: place for place in places}
            if len(places) > 1:
                names = [place.key for place in places]
                self._beside.update((name, names) for name in names)
        if is_all:
            lost += self._not_changed_yet({name for key in wanted for name in key.split(_BESIDE)}, things, in_place)
        self._together = {}
        self._watch()
        self.lose(lost)

    def _not_changed_yet(self, saved: set[str], things: Mapping[str, Any], in_place: InPlace) -> list[str]:
        """Put back what no copy has since it had not changed when that was made. Returns what cannot be, as a person reads it."""
        lost = []
        for key, place in self._kept.items():
            before = self._first.get(key, self._stands.get(key, _NEW))
            if key in saved or before is _NEW:  # a body makes it
                continue
            try:
                put_back_as_it_stood(place, before, things, in_place)
            except Exception as error:  # as above
                self._left[place.shown] = str(error)
                lost.append(place.shown)
        return lost

    def begins(self, again: bool = False) -> None:
        """A step is handed out, and its START slot written or put back, `again`: what no slot has is held here for another time."""
        self._at_start = [*self._watched, *self._in_turn]
        self._since = {}
        self._in_body = self._had_steps = True
        self._held = self._all_others() if again else {}

    def _all_others(self) -> dict[str, bytes]:
        places = [(place, value) for place, value in self._at.values() if place.key not in self._kept and type(value) not in _ATOMS]
        copies = [(place.key, self._copy(place, value)) for place, value in places if id(value) not in self._at.by_id]
        return {key: data for key, data in copies if data is not None}

    def _undo_held(self) -> set[str]:
        """Put back what a body has changed of it."""
        held = [(place, value) for place, value in self._at.values() if place.key in self._held]
        changed = [place for place, value in held if self._copy(place, value) != self._held[place.key]]
        self.put_back({PREFIX + place.key: self._held[place.key] for place in changed}, is_all=False)
        return {place.shown for place in changed}

    def stopped(self, rewind: bool, handed_out: bool = False) -> None:
        """The world was stopped. `rewind`: in a body, which is done again: names are bound as at its start.

        `handed_out`: before the body of a step that was handed out, and goes on. Else the step before is done, and the next one to come.

        What changed without being seen until then, in things that are not kept, is lost: a replacement of another rank does not have it.
        """
        unseen = [self.shown(one) for key in self.histories.changed_unseen() for one in key.split(_BESIDE)]
        bindings = self._at_start if rewind else [*self._watched, *self._in_turn]
        bound = [name for each in bindings for name in (each.undo() if rewind else each.rebound())]
        if not rewind and not handed_out:
            self._since = {}  # the END slot has those
        self.look()
        lost = {*self._since}
        if rewind or handed_out:  # the script makes the others, behind the place where the step is handed out
            lost = {name for name, was_there in self._since.items() if was_there}
        if rewind and self._held:
            lost -= self._undo_held()
        self.lose(sorted({*unseen, *lost} - {*bound}))
        self._since = {}

    # -- telling -----------------------------------------------------------------------------------------------------

    def not_kept(self) -> tuple[Mapping[int, str], dict[str, Any]]:
        """What the last look found no copy of, and what is not to be kept: names, with the values. Before them `by_id`, see ValuePlaces."""
        if self._all is not self._at:
            self._all.come()
            self._all.find()
        kept = {place.key for place, _ in self._at.values() if place.shown not in self._left}
        found = {
            place.shown: value
            for place, value in self._all.values()
            if place.key not in kept and id(value) not in self._all.by_id and not self._all.is_passed_over(value)
        }
        return self._all.by_id, found

    def lose(self, names: Iterable[str]) -> None:
        """A rank goes on with other values of these than an undisturbed one."""
        names = list(names)
        if names:
            self.told(names)

    def sizes(self) -> list[tuple[list[str], int]]:
        """Of what is kept: names that are in one copy, as a person reads them, and its bytes."""
        copies = {key.removeprefix(PREFIX): data for key, data in self._copies().items() if key != WHOLE}
        return [
            ([self.shown(one) for one in key.split(_BESIDE)], len(whole(data, self.histories.logs))) for key, data in copies.items()
        ]

    def why_not(self, shown: str) -> str:
        """Why what that name stands for is not kept; "" = it is, or nobody knows."""
        if self._at.only is not None and not is_under(shown, self._at.only):
            return "protect(..., variables=...) does not name it" if self._at.only else 'protect(..., variables="off")'
        near = [why for name, why in self._left.items() if is_under(shown, (name,)) or is_under(name, (shown,))]
        return near[0] if near else ""

    def values(self) -> Iterator[tuple[Named, bytes | None, bool]]:
        """Each place, kept or not, with a copy of its value, None for what has none; and is it kept?"""
        for place, value in self._at.values():
            if id(value) in self._at.by_id:
                yield place, pickle.dumps(self._at.by_id[id(value)], 5), place.key in self._kept
            elif not self._at.is_passed_over(value):
                yield place, self._copy(place, value), place.key in self._kept

    def unchanged(self) -> tuple[set[str], set[str]]:
        """The functions and modules that the loop is in, and what is there that no look has seen change."""
        keys = {place.key for place, _ in self._at.values() if place.key not in self._wanted}
        return {space.root for space in self._at.spaces}, keys

    @staticmethod
    def names_of(key: str) -> list[str]:
        """Those that are kept together under one among what slots keep."""
        return key.removeprefix(PREFIX).split(_BESIDE)

    def shown(self, key: str) -> str:
        """The name that a person reads, of one among what slots keep."""
        key = key.removeprefix(PREFIX)
        if _BESIDE in key:
            return ", ".join(map(self.shown, key.split(_BESIDE)))
        if key in self._kept:
            return self._kept[key].shown
        where, _, name = key.rpartition(BEHIND)
        return where.rpartition("().")[2].removeprefix("global ") + name


def _size(value: Any) -> int:
    """Bytes of a tensor or an array; of others a copy tells."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return value.nbytes if isinstance(value, np.ndarray) else 0
