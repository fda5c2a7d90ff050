"""A request's salt and adapter as one string, which nobody can make another's."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from engine.request.salts import Salt, salt_of

SALTS = st.builds(
    Salt,
    st.text() | st.builds(lambda text: Salt(text, "a", "d").joined(), st.text()),
    st.sampled_from(["", "a", "b"]),
    st.sampled_from(["d", "e"]),
).map(lambda salt: salt if salt.adapter else Salt(salt.cache_salt))


@given(SALTS, SALTS)
@example(Salt(Salt("x", "a", "d").joined()), Salt("x", "a", "d"))
def test_different_salts_have_different_strings(one: Salt, other: Salt) -> None:
    assert (one.joined() == other.joined()) == (one == other)
    assert salt_of(one.joined()) == one


def test_without_an_adapter_a_salt_is_as_it_was() -> None:
    assert Salt("tenant").joined() == "tenant"
    assert Salt("").joined() == ""
