"""The version of the package: here alone, so that every room can import it."""

__version__ = "0.1.0"
