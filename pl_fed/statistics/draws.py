"""Random draws in chunks of bounded memory."""

_NUMBERS_AT_ONCE = 2_000_000


def split_draws(draws: int, numbers: int) -> list[int]:
    """Return sizes of chunks that sum up to ``draws``, for draws of so many numbers each.

    Example:
        >>> split_draws(9, numbers=500_000)
        [4, 4, 1]
    """
    size = max(1, _NUMBERS_AT_ONCE // max(1, numbers))
    chunks = [size] * (draws // size)
    return [*chunks, draws % size] if draws % size else chunks
