"""A model on disk: a checkpoint and the configuration beside it. What drafters and targets have in common."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    from .checkpoint import Checkpoint
    from .config import Config

    Self = TypeVar("Self", bound="Model")


class Model:
    """A checkpoint with its configuration. Use it in a ``with`` statement.

    Args:
        checkpoint: closed together with the model.
        config: None where there is no readable config.json.
        config_problem: why that beside it cannot be read.
    """

    def __init__(self, checkpoint: Checkpoint, config: Config | None, config_problem: str | None) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.config_problem = config_problem

    def __enter__(self: Self) -> Self:
        """Return the model."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close its files."""
        self.close()

    def close(self) -> None:
        """Close all files."""
        self.checkpoint.close()

    @property
    def path(self) -> str:
        """What was asked for."""
        return self.checkpoint.path
