"""r4090c: turn a handful of machines with RTX 4090 cards into a training cluster."""

__version__ = "0.1.0"
