"""What every model shares."""

from speccascade_jax.core.arrays import bucket


def test_buckets_are_few_and_waste_less_than_half_of_the_prompt():
    widths = [bucket(length) for length in range(1, 1025)]
    assert widths == sorted(widths) and sorted(set(widths))[:6] == [8, 12, 16, 24, 32, 48]
    assert len(set(widths)) == 15
    for length, width in enumerate(widths, start=1):
        assert bucket(width) == width >= length
        assert width == 8 or width - length < length / 2
