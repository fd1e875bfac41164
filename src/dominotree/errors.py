"""Errors a user can cause. Each carries one line: what was wrong, what was expected, what to do."""


class DominoTreeError(Exception):
    """Base of every error that is the caller's to mend; the command line prints it without a traceback."""


class ModelNotFound(DominoTreeError):
    """A model name resolves to nothing that can be loaded here."""


class UnsupportedModel(DominoTreeError):
    """A model that cannot be run exactly is refused, and the message names the reason."""


class UnsupportedEngine(DominoTreeError):
    """A host engine of another version, or with an option, that cannot be served exactly; the message names it."""


class InvalidCheckpoint(DominoTreeError):
    """A drafter checkpoint that does not fit its config or its target; the message names the field.

    `field` is that field where drafter and target disagree about it.
    """

    field: str | None = None


class InvalidRequest(DominoTreeError):
    """A prompt or a parameter out of range."""


class NumericalError(DominoTreeError):
    """The model produced NaN logits."""
