"""LongstrideConfig: a ModelConfig as a config of transformers.

config.json has its fields under "model", where `longstride` itself reads them, too. A config.json of longstride, of a saved
model or of a run, is read as it is.
"""

from dataclasses import asdict, fields
from typing import Any

from transformers import PretrainedConfig

from longstride.model.config import BYTES, ModelConfig
from longstride.model.pretrained import CHANGEABLE
from longstride.model.saved_config import MODEL_TYPE

FIELDS = tuple(field.name for field in fields(ModelConfig))
CODE = "longstride_code"
"""The module in a saved folder that transformers imports for trust_remote_code."""
AUTO_MAP = {"AutoConfig": f"{CODE}.LongstrideConfig", "AutoModelForCausalLM": f"{CODE}.LongstrideForCausalLM"}
"""What a config.json says to transformers about the classes of its folder."""
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
"""Properties by which transformers knows the network's sizes."""
COMMIT = "_commit_hash"
"""Older versions of transformers add it to what they read from a file."""


class LongstrideConfig(PretrainedConfig):
    """A network of longstride.

    Args:
        model: The fields of a ModelConfig, as a dict.
        fields: Or the fields themselves: LongstrideConfig(layers=2, width=64, ...).
    """

    model_type = MODEL_TYPE
    has_no_defaults_at_init = True

    def __init__(self, model: dict[str, Any] | None = None, **given: Any) -> None:
        chosen = {**(model or {}), **{name: given.pop(name) for name in FIELDS if name in given}}
        for name in SIZES:  # They follow from the model.
            given.pop(name, None)
        self.model = asdict(ModelConfig.from_fields(chosen, "LongstrideConfig"))
        given.setdefault("auto_map", dict(AUTO_MAP))
        super().__init__(**{"tie_word_embeddings": False, **given})

    @property
    def network(self) -> ModelConfig:
        """The ModelConfig, complete and checked."""
        return ModelConfig.from_fields(self.model, "LongstrideConfig")

    @property
    def vocab_size(self) -> int:
        return BYTES

    @property
    def hidden_size(self) -> int:
        return self.network.width

    @property
    def num_hidden_layers(self) -> int:
        return self.network.layers

    @property
    def num_attention_heads(self) -> int:
        return self.network.heads

    @property
    def max_position_embeddings(self) -> int:
        return self.network.context

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **given: Any) -> Any:
        """Also reads what longstride writes. `given` may have fields that do not affect the weights, such as precision."""
        content = dict(config_dict)
        if content.get("model_type") != cls.model_type:
            model = content.get("model")
            network = {name: value for name, value in content.items() if name != COMMIT}
            content = {"model": model if isinstance(model, dict) else network}
        changes = {name: given.pop(name) for name in CHANGEABLE if name in given}
        for name in ("model", *FIELDS, *SIZES):
            if name in given:
                raise ValueError(f"{cls.__name__}: {name} cannot be changed, only {', '.join(CHANGEABLE)}")
        if changes and isinstance(content.get("model"), dict):
            content["model"] = {**content["model"], **changes}
        return super().from_dict(content, **given)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """As for LongstrideForCausalLM: only subclasses have code of their own to be saved."""
        if cls is not LongstrideConfig:
            super().register_for_auto_class(auto_class)

    @classmethod
    def from_network(cls, config: ModelConfig, **given: Any) -> "LongstrideConfig":
        return cls(model=asdict(config), **given)
