"""Names: how those with numbers sort."""

from speccascade_jax.core.names import natural


def test_names_with_numbers_sort_as_numbers():
    given = [
        "token_v10",
        "γ = 10",
        "token_v2",
        "γ = 8",
        "token",
        "10",
        "9",
        "h 0.75",
        "h 0.8",
        "T5 γ = 3, h 12",
        "T5 γ = 3, h 2",
    ]
    assert sorted(given, key=natural) == [
        "9", "10", "T5 γ = 3, h 2", "T5 γ = 3, h 12", "h 0.75", "h 0.8", "token", "token_v2", "token_v10", "γ = 8",
        "γ = 10",
    ]  # fmt: skip
