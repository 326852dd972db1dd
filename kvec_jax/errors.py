"""Errors with a meaning of their own; everything else is a plain ``ValueError`` or ``TypeError``."""


class KvecError(Exception):
    """Base class of the errors below."""


class UnsupportedError(KvecError, NotImplementedError):
    """An explicitly chosen implementation, or a model's feature, that this library can't do."""


class LoadError(KvecError, ValueError):
    """A model, tokenizer or weight file that can't be found, read or understood."""


class StoreError(KvecError, OSError):
    """Blocks of a cache that can't be written to, or read back from, the tier that holds them."""
