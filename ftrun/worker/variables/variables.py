"""Keep the values that a script's loop changes with the step, without a declaration in the script.

Once a value has changed since the loop began, or the source shows that the loop carries it from one iteration to the next, every
slot gets a copy, which is put back in place in a replacement and in a survivor that does the step again. In the bodies that are looked
at, `Variables.look` compares all values; in between, one comparison of identities detects each name that is bound to another object.
A replacement's script makes the values that never changed. `Variables.not_kept` returns those that cannot be kept (an iterator, a
file, a value that is too large).
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
from ftrun.worker.torch_compat.frames_private import dict_of_locals
from ftrun.worker.variables import spaces
from ftrun.worker.variables.bindings import BEHIND, Bindings, Named, put_back, put_back_as_it_stood, shared, together
from ftrun.worker.variables.copies import Copied, TooLarge, copied, placed
from ftrun.worker.variables.guarded_memory import GuardedMemory
from ftrun.worker.variables.histories import LARGEST, Histories, whole
from ftrun.worker.variables.in_place import InPlace
from ftrun.worker.variables.spaces import Space
from ftrun.worker.variables.value_places import ValuePlaces, is_under

PREFIX = "variable "  # begins the name of a variable in the Python state of a slot
WHOLE = PREFIX + "whole"  # names the places in `ValuePlaces.whole`
_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))
_NEW = object()
_BESIDE = "\n"  # between names that are kept together
# kinds of objects that are at their place in every process, and hold nothing that a loop changes
_HARMLESS = frozenset(
    "function builtin_function_or_method builtin_method method type module code lock RLock _thread.lock object weakref ReferenceType "
    "DataLoader ProcessGroup SwapGroup DeviceMesh Thread Condition StreamHandler FileHandler Stream frame".split()
)


_TURN = 24  # spaces whose names each step compares, beside those of the loop's own functions and modules


class Variables:
    """The variables of one rank.

    Args:
        modules: The protected modules.
        known: Name -> object that the job keeps itself: names are bound to it, and it is not copied.
        ignored: Names and objects to leave out.
        only: The names, such as `x` or `self.meters`, to keep; None = all.
        memory: The memory that the job guards.
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
        self.loop: object = None  # the loop that `leave` ends, for callers with several
        self.told: Callable[[Iterable[str]], None] = lambda names: None  # receives the names of lost values
        self.histories = Histories(memory)
        self._at = ValuePlaces(modules, known, ignored, only)
        self._all = self._at if only is None else ValuePlaces(modules, known, ignored, None)  # all places: `not_kept` needs them
        self._stands: dict[str, Any] = {}  # key of a place -> stand-in for its value at the last look
        self.retains = False  # may all ranks go back to a step in which less had changed?
        self._first: dict[str, Any] = {}  # key -> stand-in for the value before it changed
        self._things: dict[str, int] = {}  # key -> id of the value: an equal object may be a part of another value
        self._kept: dict[str, Named] = {}  # places that slots keep
        self._wanted: set[str] = set()  # keys to keep, also those that a predecessor kept
        self._beside: dict[str, list[str]] = {}  # kept key -> all keys that hold a part of the same object
        self._parts: dict[int, str] = {}  # id of a part of a value -> first key that held it, at the last look
        self._together: dict[int, set[str]] = {}  # id of an object that several keys held at the last look -> those
        self._had_steps = False
        self._in_body = False  # a step was handed out; until the next, the same keys are kept together
        self._due = False  # may more keys have to be kept together then?
        self.as_before: dict[str, bytes] | None = None  # the result of `capture` under the earlier groups of keys
        self._bound: dict[str, int] = {}  # kept key -> id of its value at the last look
        self._met: list[tuple[Named, Copied]] | None = None  # copies that a look has made
        self._left: dict[str, str] = {}  # displayed name of a place -> why it is not kept
        self._since: dict[str, bool] = {}  # changed since the step was handed out -> did it exist before?
        self._at_start: list[Bindings] = []  # bindings when the step was handed out
        self._held: dict[str, bytes] = {}  # key -> copy from then that no slot has, in case the step begins once more
        self._watched: list[Bindings] = []
        self._in_turn: list[Bindings] = []
        self._turn = 0

    # -- what stands for a value -------------------------------------------------------------------------------------

    def passes_over(self, iterated: set[int]) -> None:
        """Pass over loaders and samplers that are kept with the place in the data. `iterated`: their ids; the set grows."""
        self._at.iterated = self._all.iterated = iterated

    def here(self) -> None:
        """Look at everything if the loop's frames are new; call it before the loop gives something to the script."""
        self._in_body = False
        if self._at.only is not None and not self._at.only:
            return
        frames = self._at.frames
        if (not frames or outside() is not frames[0]) and self._at.come():
            self.look()  # an earlier loop, or code between the two, may have changed something

    def leave(self) -> None:
        """Drop everything that refers to the frames of a finished loop, so that they may end."""
        self._at.leave()
        self._all.leave()
        self._watched, self._in_turn, self._kept, self._at_start = [], [], {}, []
        self._bound, self._beside = {}, {}
        self.histories.let_go()

    def _stand(self, place: Named, value: Any) -> Any:
        """Return a stand-in that is equal as long as the value is: a copy if it may be needed, or a digest; None if it is not kept."""
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
        """Copy a value; return None, and remember why, if it cannot be kept.

        `kept_as`: the name under which a slot has the copy; "" = the copy is only compared.
        """
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
        """Remember which objects the names are bound to."""
        self._watched, self._in_turn = [], []
        for space in self._at.spaces:
            bindings = self._bindings_of(space)
            if bindings is not None:
                often = space.frame is not None or space.owner is None
                (self._watched if often else self._in_turn).append(bindings)

    def _bindings_of(self, space: Space) -> Bindings | None:
        """Return the bindings of a space; None for a class or a closure, which only `look` compares."""
        if space.raw is None and space.frame is None:
            return None
        values = space.read()
        names = [name for name in values if self._at.counts(space, name) and Named(space, name).key not in self._kept]
        if not names:
            return None
        get: Any = operator.itemgetter(*names, names[0])  # with one name it would return no tuple
        raw = space.raw if space.raw is not None else values
        return Bindings(space, names, get, get(raw), len(raw), dict_of_locals(space.frame) if space.frame else None)

    def _is_elsewhere(self, bindings: Bindings, now: Any) -> bool:
        """Compare names that are bound anew. Return True if `look` must search everything, as for a new object of the script."""
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
                    return True  # it may share a part with others
        renewed = self._bindings_of(space)
        for each in (self._watched, self._in_turn):
            if bindings in each:
                each[each.index(bindings)] = renewed or bindings._replace(before=now)
        return False

    def _compare(self, place: Named, value: Any) -> None:
        """Compare a value with the last look; keep it from here on if it, or its object, is another one."""
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
        """Look at everything, and keep from here on what changed since the last look."""
        if not self._at.frames:
            return
        before = {*self._at.roots}
        self._at.find()
        self._kept, self._bound, self._met = {}, {}, []
        for place, value in self._at.values():
            if place.shown in self._at.carried and place.key not in self._wanted and self._is_plain(place, value):
                # unchanged so far, but a replacement may have another value, from a checkpoint that was written meanwhile
                self._wanted.add(place.key)
                if self.retains:
                    self._first.setdefault(place.key, self._stand(place, value))
            if place.key in self._wanted:
                self._kept[place.key] = place
                if type(value) not in _ATOMS:
                    self._bound[place.key] = id(value)
                    self._copy(place, value, "" if place.key in self._beside else place.key)
            elif place.space.root not in before:  # take the values of a new function or module as they are
                self._stands[place.key], self._things[place.key] = self._stand(place, value), id(value)
            else:
                self._compare(place, value)
        self._due = self._in_body
        held = {place.key: made.held() for place, made in self._met}
        self._together = together(held)
        if not self._in_body:
            self._find_shared({place.key: place for place, _ in self._met}, held)
        self._met = None  # only now: the ids of parts are valid as long as the copies live
        self._watch()

    def _is_plain(self, place: Named, value: Any) -> bool:
        """Is it a value that can be kept, neither None nor an object whose attributes are places themselves?"""
        return value is not None and id(value) not in self._at.by_id and not spaces.is_open(value) and self._stand(place, value) is not None

    def _find_shared(self, places: Mapping[str, Named], held: Mapping[str, Iterable[int]]) -> None:
        """Keep names that share an object together, once one of them changed, so that a replacement's names share it too."""
        self._parts, groups = shared(held, self._beside.values())
        self._beside = {}
        for names in groups:
            if not self._kept.keys().isdisjoint(names):
                self._beside |= dict.fromkeys(names, names)
                self._kept |= {name: places[name] for name in names}
                self._wanted.update(names)

    def capture(self, whole: bool) -> dict[str, bytes]:
        """Return the values that changed since the loop began, for a slot.

        `whole`: look at everything; otherwise only at bindings. Each step pays for that, so the code makes few calls.
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
            if found is not None:  # `frames_private.leave`, inlined
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
        """Is a kept name now bound to another object, which was a part of another value at the last look?"""
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
        """Does the value of that key still hold the object of that id? Since the last look the id may have passed to another."""
        for place, value in self._at.values():
            if place.key == key:
                return mark in copied(value, self._at.by_id, LARGEST, self.memory).held()
        return False

    def _add_together(self, keys: list[str], state: dict[str, bytes]) -> None:
        """Add names that share an object to `state`, in one copy."""
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
        """Put back a result of `capture`, here or in a predecessor, or a part of it; report values that cannot be put back as lost."""
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
            # in a replacement: its predecessor may have had several objects where the script has made one
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
        """Put back values that no slot has since they had not changed by then. Return the displayed names of those that cannot be."""
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
        """Note that a step is handed out. `again`: its START slot was put back; hold copies of values that no slot has."""
        self._at_start = [*self._watched, *self._in_turn]
        self._since = {}
        self._in_body = self._had_steps = True
        self._held = self._all_others() if again else {}

    def _all_others(self) -> dict[str, bytes]:
        places = [(place, value) for place, value in self._at.values() if place.key not in self._kept and type(value) not in _ATOMS]
        copies = [(place.key, self._copy(place, value)) for place, value in places if id(value) not in self._at.by_id]
        return {key: data for key, data in copies if data is not None}

    def _undo_held(self) -> set[str]:
        """Put back the held values that a body has changed, and return their displayed names."""
        held = [(place, value) for place, value in self._at.values() if place.key in self._held]
        changed = [place for place, value in held if self._copy(place, value) != self._held[place.key]]
        self.put_back({PREFIX + place.key: self._held[place.key] for place in changed}, is_all=False)
        return {place.shown for place in changed}

    def stopped(self, rewind: bool, handed_out: bool = False) -> None:
        """Put bindings in order after a stop of the world, and report lost values.

        Changes of values that were not kept until now are lost: a replacement of another rank does not have them.

        Args:
            rewind: The stop came in a body, which is done again: bind names as at its start.
            handed_out: The stop came before the body of a step that was handed out, and goes on. Without either, it came between two steps.
        """
        unseen = [self.shown(one) for key in self.histories.changed_unseen() for one in key.split(_BESIDE)]
        bindings = self._at_start if rewind else [*self._watched, *self._in_turn]
        bound = [name for each in bindings for name in (each.undo() if rewind else each.rebound())]
        if not rewind and not handed_out:
            self._since = {}  # the END slot has those
        self.look()
        lost = {*self._since}
        if rewind or handed_out:  # the script makes the others after the hand-out
            lost = {name for name, was_there in self._since.items() if was_there}
        if rewind and self._held:
            lost -= self._undo_held()
        self.lose(sorted({*unseen, *lost} - {*bound}))
        self._since = {}

    # -- telling -----------------------------------------------------------------------------------------------------

    def not_kept(self) -> tuple[Mapping[int, str], dict[str, Any]]:
        """Return the `by_id` of `ValuePlaces`, and the values that are not kept, by name: those without a copy, and those left out."""
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
        """Report names with whose values this rank goes on otherwise than an undisturbed one."""
        names = list(names)
        if names:
            self.told(names)

    def sizes(self) -> list[tuple[list[str], int]]:
        """Return for each copy that is kept the displayed names in it, and its bytes."""
        copies = {key.removeprefix(PREFIX): data for key, data in self._copies().items() if key != WHOLE}
        return [
            ([self.shown(one) for one in key.split(_BESIDE)], len(whole(data, self.histories.logs))) for key, data in copies.items()
        ]

    def why_not(self, shown: str) -> str:
        """Return why the value of a displayed name is not kept; "" = it is kept, or the reason is unknown."""
        if self._at.only is not None and not is_under(shown, self._at.only):
            return "protect(..., variables=...) does not name it" if self._at.only else 'protect(..., variables="off")'
        near = [why for name, why in self._left.items() if is_under(shown, (name,)) or is_under(name, (shown,))]
        return near[0] if near else ""

    def values(self) -> Iterator[tuple[Named, bytes | None, bool]]:
        """Yield each place, a copy of its value (None if there is none), and whether it is kept."""
        for place, value in self._at.values():
            if id(value) in self._at.by_id:
                yield place, pickle.dumps(self._at.by_id[id(value)], 5), place.key in self._kept
            elif not self._at.is_passed_over(value):
                yield place, self._copy(place, value), place.key in self._kept

    def unchanged(self) -> tuple[set[str], set[str]]:
        """Return the functions and modules around the loop, and the keys there that no look has detected to change."""
        keys = {place.key for place, _ in self._at.values() if place.key not in self._wanted}
        return {space.root for space in self._at.spaces}, keys

    @staticmethod
    def names_of(key: str) -> list[str]:
        """Return the names that one key of a slot keeps together."""
        return key.removeprefix(PREFIX).split(_BESIDE)

    def shown(self, key: str) -> str:
        """Return the displayed name for a key of a slot."""
        key = key.removeprefix(PREFIX)
        if _BESIDE in key:
            return ", ".join(map(self.shown, key.split(_BESIDE)))
        if key in self._kept:
            return self._kept[key].shown
        where, _, name = key.rpartition(BEHIND)
        return where.rpartition("().")[2].removeprefix("global ") + name


def _size(value: Any) -> int:
    """Return the bytes of a tensor or an array; 0 for other values, whose copy tells."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return value.nbytes if isinstance(value, np.ndarray) else 0
