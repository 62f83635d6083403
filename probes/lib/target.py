"""The target (verifier) model: its output head, embedding and final norm, read by rows out of hundreds of gigabytes.

Multimodal models put their language model below ``language_model.``; tied ones have no head of their own; quantised
ones may or may not have left the head alone; padded ones have more rows than tokens.
"""

from __future__ import annotations

from . import config as configs
from .checkpoint import open_checkpoint
from .files import Unreadable, quoted, shown
from .matrix import Matrix
from .model import Model

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from .checkpoint import Checkpoint
    from .files import Meter

_HEADS = ("lm_head.weight", "output.weight", "embed_out.weight")
_EMBEDDINGS = ("embed_tokens.weight", "tok_embeddings.weight", "wte.weight", "word_embeddings.weight")
_NORMS = ("norm.weight", "final_layernorm.weight", "ln_f.weight")
_OUTER = ("", "model.", "language_model.", "language_model.model.", "model.language_model.", "model.language_model.model.",
          "transformer.", "text_model.", "llm.", "llm.model.")  # fmt: skip
"""Where the language model's own tensors may begin; a vision tower's embedding or norm begins elsewhere."""
_QUANTISED = ("weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point", "qweight", "qzeros", "scales", "g_idx",
              "absmax", "quant_state", "weight_shape")  # fmt: skip


class Target(Model):
    """A target model's head, embedding and norm.

    Args:
        checkpoint: closed together with the target.
        config: None where there is no readable config.json.
        config_problem: why that beside it cannot be read.
    """

    def __init__(self, checkpoint: Checkpoint, config: configs.Config | None, config_problem: str | None) -> None:
        super().__init__(checkpoint, config, config_problem)
        names = set(checkpoint.names())
        self._own_head = _find(names, _HEADS)
        self._quantised_head = None if self._own_head else _quantised(names, "lm_head")
        self.embed_name = _find(names, _EMBEDDINGS)
        """Full name of the embedding; None where there is none."""
        self.norm_name = _find(names, _NORMS)
        """Full name of the final norm before the head; None where there is none."""

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self._own_head is None and self._quantised_head is None

    @property
    def vocab_size(self) -> int | None:
        """Tokens of the target by config.json; the head may have more rows. None where it does not say."""
        return self.config.target_vocab_size if self.config else None

    @property
    def layers(self) -> int | None:
        """Decoder layers by config.json; None where it does not say."""
        return self.config.layers if self.config else None

    @property
    def head_name(self) -> str:
        """Full name of the head's tensor; raise Unreadable where there is none that can be read."""
        if self._quantised_head is not None:
            raise Unreadable(
                self.path,
                "its output head is quantised (%s)" % quoted(self._quantised_head),
                "give a copy of the model whose lm_head is bfloat16, float16 or float32",
            )
        name = self._own_head or self.embed_name
        if name is None:
            raise Unreadable(self.path, "holds neither an output head nor an embedding", "give the whole target model")
        if self.tied and self.config is not None and self.config.tied is False:
            raise Unreadable(
                self.path,
                "holds no output head, and its config.json says that it is not the embedding",
                "give the whole target model: the file that holds lm_head.weight is missing",
            )
        return name

    def head(self) -> Matrix:
        """Return the output head, [rows, hidden]; the embedding where it is tied. Raise Damaged or Unreadable."""
        return Matrix(self.checkpoint, self.head_name)

    def embedding(self) -> Matrix:
        """Return the input embedding, [rows, hidden]; raise Damaged or Unreadable."""
        if self.embed_name is None:
            raise Unreadable(self.path, "holds no embedding", "give the whole target model")
        return Matrix(self.checkpoint, self.embed_name)

    def norm(self) -> NDArray[Any] | None:
        """Return the weight of the final norm, [hidden]; None where there is none. Raise Damaged or Unreadable."""
        return None if self.norm_name is None else self.checkpoint.read(self.norm_name)

    def norm_weight(self) -> NDArray[Any] | None:
        """Return the factors that the final norm applies, [hidden]: Gemma stores them less one."""
        weight = self.norm()
        kind = self.config.layer.get("model_type") if self.config else None
        return weight + 1 if weight is not None and isinstance(kind, str) and kind.startswith("gemma") else weight

    @property
    def norm_eps(self) -> float:
        """What the final norm adds under the root."""
        value = self.config.layer.get("rms_norm_eps") if self.config else None
        return value if type(value) is float and 0 < value < 1 else 1e-6


def open_target(path: str, meter: Meter) -> Target:
    """Return the target model at ``path``, a folder or a file.

    Raises:
        Unreadable: there is nothing, or nothing that is read.
        Damaged: it contradicts itself.
    """
    checkpoint = open_checkpoint(path, meter)
    try:
        return Target(checkpoint, *configs.read(checkpoint.folder, meter))
    except BaseException:
        checkpoint.close()
        raise


def _find(names: set[str], wanted: tuple[str, ...]) -> str | None:
    return next((outer + own for own in wanted for outer in _OUTER if outer + own in names), None)


def _quantised(names: set[str], module: str) -> str | None:
    """Return a tensor that shows that ``module`` is stored quantised, None where there is none."""
    found = (outer + module + "." + part for outer in _OUTER for part in _QUANTISED)
    return next((shown(name) for name in found if name in names), None)
