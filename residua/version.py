"""The version of Residua: `residua.__version__`, the wheel and exported folders read it here."""

__version__ = "0.2.0"
