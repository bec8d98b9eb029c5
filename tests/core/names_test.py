"""Names: how those with numbers sort."""

from speccascade_jax.core.names import natural


def test_names_with_numbers_sort_as_numbers():
    texts = ["9", "10", "T5 γ = 3, h 2", "T5 γ = 3, h 12", "h 0.75", "h 0.8", "token", "token_v2", "token_v10"]
    texts += ["γ = 8", "γ = 10"]
    assert sorted(reversed(texts), key=natural) == texts
