"""What is remembered lives no longer than what it is about, and never becomes that of another object."""

from __future__ import annotations

import gc
import threading
import weakref

from torch import nn

from lowtide.interface.cache import Cache


class Thing:
    """Something that can be referred to weakly."""


def test_a_value_is_found_by_its_key() -> None:
    cache: Cache[str] = Cache(most=2)
    assert cache.get("a") is None
    cache.put("a", "one")
    assert (cache.get("a"), len(cache)) == ("one", 1)
    cache.put("a", "other")
    assert (cache.get("a"), len(cache)) == ("other", 1)
    cache.clear()
    assert (cache.get("a"), len(cache)) == (None, 0)


def test_the_least_recently_used_goes_first() -> None:
    cache: Cache[int] = Cache(most=2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert [cache.get(key) for key in "abc"] == [1, None, 3]
    cache.put("a", 4)  # what is put again was used
    cache.put("d", 5)
    assert [cache.get(key) for key in "acd"] == [4, None, 5]


def test_a_smaller_bound_holds_from_the_next_entry_on() -> None:
    cache: Cache[int] = Cache(most=10)
    for number in range(10):
        cache.put(number, number)
    cache.most = 3
    cache.put("new", 10)
    assert [cache.get(key) for key in (7, 8, 9, "new")] == [None, 8, 9, 10]


def test_setdefault_keeps_what_is_there() -> None:
    cache: Cache[int] = Cache(most=2)
    assert cache.setdefault("a", 1) == 1
    assert cache.setdefault("a", 2) == 1


def test_an_entry_goes_with_any_of_its_anchors() -> None:
    cache: Cache[int] = Cache(most=9)
    things = [Thing() for _ in range(3)]
    cache.put("all", 1, anchors=things)
    cache.put("first", 2, anchors=things[:1])
    del things[1]
    assert (cache.get("all"), cache.get("first"), len(cache)) == (None, 2, 1)


def test_an_entry_goes_with_an_anchor_that_garbage_collection_finds() -> None:
    cache: Cache[int] = Cache(most=9)
    module = nn.Sequential(nn.Linear(1, 1))
    vars(module)["itself"] = module
    cache.put("key", 1, anchors=[module])
    del module
    assert len(cache) == 1
    gc.collect()
    assert len(cache) == 0


def test_anchors_and_dropped_values_are_not_kept_alive() -> None:
    cache: Cache[Thing] = Cache(most=1)
    anchor, value = Thing(), Thing()
    dead = weakref.ref(anchor)
    cache.put("key", value, anchors=[anchor])
    del anchor
    assert dead() is None
    dropped = weakref.ref(value)
    cache.put("key", value)
    del value
    cache.put("other", Thing())
    assert dropped() is None


def test_an_old_anchor_takes_nothing_from_a_new_entry() -> None:
    cache: Cache[int] = Cache(most=9)
    old, new = Thing(), Thing()
    cache.put("key", 1, anchors=[old])
    cache.put("key", 2, anchors=[new])
    del old
    assert cache.get("key") == 2


def test_identities_as_keys_never_find_what_was_another_objects() -> None:
    cache: Cache[int] = Cache(most=10_000)
    reused, seen = 0, set[int]()
    for number in range(2000):
        thing = Thing()
        reused += id(thing) in seen
        seen.add(id(thing))
        assert cache.get(id(thing)) is None
        cache.put(id(thing), number, anchors=[thing])
        assert cache.get(id(thing)) == number
        del thing
    assert reused > 0
    assert len(cache) == 0


def test_what_allows_no_weak_reference_is_not_remembered() -> None:
    cache: Cache[int] = Cache(most=9)
    cache.put("key", 1, anchors=[Thing(), object()])
    assert (cache.get("key"), len(cache)) == (None, 0)
    assert cache.setdefault("key", 2, anchors=[object()]) == 2


def test_threads_that_make_and_let_go() -> None:
    cache: Cache[int] = Cache(most=50)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            kept: list[Thing] = []
            for number in range(2000):
                thing = Thing()
                assert cache.setdefault((seed, id(thing)), number, anchors=[thing]) == number
                kept.append(thing)
                if number % 7 == 0:
                    kept.clear()
                cache.get((1 - seed, number))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(cache) <= 50
