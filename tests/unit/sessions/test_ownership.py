"""Tests of ownership."""

from __future__ import annotations

import hmac

import pytest

from microturn.sessions.ownership import KeyHash, sharing_salt

KEY = "ours"


def test_a_hash_does_not_hold_the_key_and_equal_keys_do_not_look_equal() -> None:
    one, other = KeyHash.of(KEY), KeyHash.of(KEY)
    assert KEY.encode() not in one.salt + one.digest
    assert one.salt != other.salt
    assert one.digest != other.digest
    assert one.matches(KEY)
    assert other.matches(KEY)


@pytest.mark.parametrize("given", ["theirs", "our", "ours ", "", None, "\ud800"])
def test_no_other_key_matches(given: str | None) -> None:
    assert not KeyHash.of(KEY).matches(given)


def test_no_key_is_matched_by_no_key_only() -> None:
    assert KeyHash.of(None).matches(None)
    assert not KeyHash.of(None).matches("")
    assert not KeyHash.of("").matches(None)


def test_a_hash_that_was_written_down_still_knows_its_key() -> None:
    known = KeyHash.of(KEY)
    assert KeyHash(bytes(known.salt), bytes(known.digest)).matches(KEY)


@pytest.mark.parametrize("given", [None, "theirs", KEY])
def test_keys_are_compared_in_constant_time(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that stops at the first byte that differs tells how many were right."""
    known = KeyHash.of(KEY)
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def listening_compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", listening_compare)
    assert known.matches(given) is (given == KEY)
    ((one, other),) = compared
    assert (len(one), other) == (32, known.digest)


def test_each_tenant_and_salt_have_a_sharing_salt_of_their_own() -> None:
    pairs = [(None, ""), (None, "a"), ("", ""), ("", "a"), ("a", ""), ("a", "b"), ("b", "a"), ("", "ab"), ("ab", "")]
    pairs += [("null", ""), (None, '["a", "b"]'), ('a", "', "b"), ("a", '", "b'), ("\ud800", ""), (None, "\ud800")]
    salts = [sharing_salt(tenant, cache_salt) for tenant, cache_salt in pairs]
    assert len(set(salts)) == len(pairs)
    assert salts == [sharing_salt(tenant, cache_salt) for tenant, cache_salt in pairs]
    # Never as long as a page's key, which is 16 bytes.
    assert {len(salt.encode()) for salt in salts} == {32}
