"""Data sets."""

from featureflock.data.two_view_digits import TwoViewDigits, two_view_digits

__all__ = ["TwoViewDigits", "two_view_digits"]
