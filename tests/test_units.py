"""Bytes and durations as people write and read them."""

import pytest

from adaptive_trainer.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("20GiB", 20 * 2**30),
        ("1.5 GB", 1_500_000_000),
        ("1048576", 2**20),
        ("64mib", 2**26),
        ("0.1KiB", 102),
        ("7B", 7),
    ],
)
def test_amounts_of_memory_are_read(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "12 parsecs", "1.2.3GiB", "GiB", "1e3"])
def test_what_is_no_amount_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="write for example"):
        parse_bytes(text)


def test_bytes_are_written_in_the_largest_unit_that_fits():
    assert [format_bytes(n) for n in (0, 1023, 1024, 42467328, 2**40, None)] == [
        "0 B", "1023 B", "1.0 KiB", "40.5 MiB", "1.0 TiB", "unknown",
    ]  # fmt: skip


def test_seconds_are_written_as_people_say_them():
    assert [format_seconds(s) for s in (0.0123, 2, 75, 3700)] == ["12 ms", "2.0 s", "1 min 15 s", "1 h 1 min"]
