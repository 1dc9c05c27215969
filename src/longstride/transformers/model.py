"""LongstrideForCausalLM: the Sparse Transformer as a causal language model of transformers.

Our network predicts token t at position t, from a start vector and the tokens before. Models of transformers predict token
t + 1 at position t. So n tokens go through positions 0 to n of the network, one more than there are, and the results of
positions 1 to n are the logits: `network` of the tokens and one more byte, which it reads nowhere, without position 0. What
the network says about the first token, from the start vector alone, has no place in transformers' logits and is not in its
loss; `network.nats` has it. The last of `context` tokens has no next position: see `forward`.

Names and values of the weights are those of `SparseTransformer`, so both read each other's folders.
"""

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from longstride.common.checks import short_reason, short_repr, suggest, whole_number
from longstride.model import ModelConfig, SparseTransformer, recompute
from longstride.model.card import Card
from longstride.model.config import BYTES
from longstride.model.pretrained import CHANGEABLE
from longstride.model.saved_config import find_settings
from longstride.model.shipped import find_model
from longstride.model.transformer import ResidualBlock
from longstride.transformers.cache import LongstrideCache
from longstride.transformers.card import write_page
from longstride.transformers.config import CODE, LongstrideConfig
from longstride.transformers.tokenizer import ByteTokenizer

OWNER = "LongstrideForCausalLM"
IGNORED = -100
"""The label of tokens that are not scored."""
PRECISIONS = ("float32", "bfloat16", "float16", "float64")
HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
"""Arguments of from_pretrained that say where a file comes from."""
SHIM = '''"""For transformers' trust_remote_code: the classes of longstride, from pip install 'longstride[transformers]'."""

from longstride.transformers import ByteTokenizer, LongstrideConfig, LongstrideForCausalLM  # noqa: F401
'''


class LongstrideForCausalLM(PreTrainedModel, GenerationMixin):
    """A network of longstride with the methods of transformers: generate, Trainer, pipeline, save_pretrained.

    `network` is the SparseTransformer itself. Its weights stay float32; `dtype` in from_pretrained is the precision of the
    activations.
    """

    config_class = LongstrideConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["ResidualBlock"]  # noqa: RUF012  # As in the base class.

    def __init__(self, config: LongstrideConfig, **unknown: Any) -> None:
        """`unknown`: what from_pretrained was given that is neither its own nor a field of the config."""
        for name in unknown:
            raise ValueError(f"{OWNER}: from_pretrained has no argument {name!r}, nor has the config; leave it out")
        super().__init__(config)
        network = SparseTransformer(config.network)
        # The network is no module of this model, but its parts are: so the names of all weights are the network's.
        for name, part in network.named_children():
            setattr(self, name, part)
        self.__dict__["network"] = network
        self.gradient_checkpointing = False
        self.post_init()

    def __setattr__(self, name: str, value: Any) -> None:
        """A part of the network that is replaced here computes there."""
        super().__setattr__(name, value)
        network = self.__dict__.get("network")
        if network is not None and name in network._modules:
            setattr(network, name, value)

    def _check_parts(self) -> None:
        """Raises ValueError where a part was replaced here alone, or in the network alone."""
        for name, part in self.network.named_children():
            if self._modules.get(name) is not part:
                raise ValueError(
                    f"{OWNER}: model.{name} and model.network.{name} are not the same module; replace it by "
                    f"model.{name} = module, which sets both"
                )

    def _replicate_for_data_parallel(self) -> Any:
        """Called by nn.DataParallel, which then sets the replica's parts."""
        replica = super()._replicate_for_data_parallel()
        replica.__dict__["network"] = self.network._replicate_for_data_parallel()
        return replica

    def _init_weights(self, module: Any) -> None:
        """The network has initialised itself."""

    def train(self, mode: bool = True) -> "LongstrideForCausalLM":
        self.network.training = mode
        return super().train(mode)

    def get_input_embeddings(self) -> Any:
        return self.embedding.token

    def set_input_embeddings(self, value: Any) -> None:
        self.embedding.token = value

    def get_output_embeddings(self) -> Any:
        return self.output

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.output = new_embeddings

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *_: Any, **__: Any) -> Any:
        if new_num_tokens not in (None, BYTES):
            raise ValueError(
                f"{OWNER}: new_num_tokens = {new_num_tokens} is not possible, since tokens are the {BYTES} bytes; leave the "
                "size as it is"
            )
        return self.get_input_embeddings()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: LongstrideCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **others: Any,
    ) -> Any:
        """Returns logits [batch, n, 256] of the tokens after each, and with labels the loss.

        Args:
            input_ids: Bytes [batch, n], n < context. With labels n may be context: the logits after the last token, which
                the loss does not need, are then NaN.
            attention_mask: [batch, n]; padding on the right alone, since a position says which byte of the data it is, and
                none with a cache.
            labels: [batch, n], -100 for tokens without a score. As everywhere in transformers they are shifted here: the
                loss is the mean of -log p, in nats, of labels 1 to n - 1, each given the tokens before it.
            past_key_values: A LongstrideCache of the tokens before these.
            use_cache: Whether to return a cache; generate() sets it. Not with labels: nothing in a cache has gradients.
            logits_to_keep: Return only this many, the last ones; 0: all. Or a tensor of positions.
            num_items_in_batch: Number that the sum of the loss is divided by, instead of the number of scored labels.
        """
        self._check_parts()
        asked = {name: getattr(self.config, name) for name in ("output_attentions", "output_hidden_states")}
        for name, given in {**asked, **others}.items():
            if given is not None and given is not False and name != "tokenizer":  # generate() has one for stop_strings.
                shown = "a tensor" if isinstance(given, Tensor) else short_repr(given)
                raise ValueError(f"{OWNER}: {name} = {shown} is not supported; leave it out")
        for name, given in (("input_ids", input_ids), ("attention_mask", attention_mask), ("labels", labels)):
            if given is not None and not isinstance(given, Tensor):
                raise ValueError(f"{OWNER}: {name} must be a tensor [batch, n], got {short_repr(given)}")
        if input_ids is None or input_ids.dim() != 2:
            got = None if input_ids is None else list(input_ids.shape)
            raise ValueError(f"{OWNER}: input_ids must be bytes [batch, n], got {got}")
        if not input_ids.shape[1]:
            raise ValueError(
                f"{OWNER}: input_ids has no tokens; give at least one byte (longstride sample starts from none)"
            )
        if not isinstance(logits_to_keep, Tensor):
            logits_to_keep = whole_number(OWNER, "logits_to_keep", logits_to_keep, 0)
        cached = bool(use_cache) or past_key_values is not None
        earlier = 0 if past_key_values is None else self._own_cache(past_key_values).get_seq_length()
        _check_mask(attention_mask, len(input_ids), earlier + input_ids.shape[1], cached)
        if cached and labels is not None:
            raise ValueError(f"{OWNER}: labels and a cache do not go together; leave out use_cache and past_key_values")
        loss = cache = None
        if cached:
            logits, cache = self._extend(input_ids, past_key_values, logits_to_keep)
        else:
            logits = self._logits(input_ids, labels is not None)
            loss = None if labels is None else _loss(logits, labels, num_items_in_batch)
        kept = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)
        output = CausalLMOutputWithPast(loss=loss, logits=logits[:, kept], past_key_values=cache)
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()

    def _logits(self, tokens: Tensor, has_labels: bool) -> Tensor:
        n, context = tokens.shape[1], self.network.config.context
        if n < context:
            # The added byte is predicted at position n, and read nowhere.
            return self.network.logits(self.network.hidden(F.pad(tokens, (0, 1)))[:, 1:])
        if n == context and has_labels:
            logits = self.network.logits(self.network.hidden(tokens)[:, 1:])
            return F.pad(logits, (0, 0, 0, 1), value=torch.nan)
        raise ValueError(
            f"{OWNER}: input_ids has {n:,} tokens, and the context is {context:,}: give at most {context - 1:,}, or with "
            f"labels {context:,}"
        )

    def _own_cache(self, cache: Any) -> LongstrideCache:
        """Returns the cache, if it is one of this model; ValueError otherwise."""
        if not isinstance(cache, LongstrideCache):
            raise ValueError(
                f"{OWNER}: past_key_values must be a LongstrideCache, got {type(cache).__name__}; leave it out, and "
                "generate() makes one"
            )
        if cache.network is not self.network:
            raise ValueError(
                f"{OWNER}: past_key_values is the cache of another model; make one with LongstrideCache(model.network)"
            )
        return cache

    def _extend(self, tokens: Tensor, cache: LongstrideCache | None, keep: int | Tensor) -> tuple[Tensor, LongstrideCache]:
        if cache is None:
            cache = LongstrideCache(self.network)
        self.network.check_tokens(tokens)
        needs_all = cache.get_seq_length() == 0 and tokens.shape[1] > 1 and (isinstance(keep, Tensor) or keep != 1)
        logits = self._logits(tokens, False) if needs_all else None
        last = cache.extend(tokens)
        return last if logits is None else logits, cache

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, batch_size: int, max_cache_length: int
    ) -> None:  # fmt: skip
        """Makes the cache of generate(), with room for its tokens and no more."""
        if mode == GenerationMode.ASSISTED_GENERATION:
            raise ValueError(
                f"{OWNER}: assisted generation and prompt lookup are not supported, since keys that no later query sees are "
                "gone; leave out assistant_model and prompt_lookup_num_tokens"
            )
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"{OWNER}: cache_implementation = {generation_config.cache_implementation!r} is not supported; leave it "
                "out, and generate() makes a LongstrideCache"
            )
        if model_kwargs.get("past_key_values") is not None:
            self._own_cache(model_kwargs["past_key_values"])
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = LongstrideCache(self.network, max_cache_length)

    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)  # transformers reads its signature.
    def prepare_inputs_for_generation(self, *given: Any, **others: Any) -> Any:
        new = others.get("next_sequence_length")
        if new is not None and new < 1:
            raise ValueError(
                f"{OWNER}: past_key_values has {others['past_key_values'].get_seq_length():,} tokens; give generate() the "
                "whole text as input_ids, with at least one token more"
            )
        return super().prepare_inputs_for_generation(*given, **others)

    def init_continuous_batching(self, *_: Any, **__: Any) -> Any:
        """Called by generate_batch(), too."""
        raise NotImplementedError(
            f"{OWNER}: continuous batching and generate_batch are not supported, since they keep pages of all keys; use "
            "generate(), or longstride serve"
        )

    def _set_gradient_checkpointing(self, enable: bool = True, *_: Any, **__: Any) -> None:
        """Activation checkpointing is our recomputation: "on" for every block, instead of what the config says."""
        config = self.network.config
        self.gradient_checkpointing = enable
        self.network.recomputed = recompute.read("on", config.layers) if enable else config.recomputed
        for block, choice in zip(self.blocks, self.network.recomputed):
            assert isinstance(block, ResidualBlock)
            block.ff.recompute = choice != "off"

    def save_pretrained(self, save_directory: str | Path, is_main_process: bool = True, **given: Any) -> None:
        """Writes a folder that transformers and longstride read. Others load it with trust_remote_code=True."""
        if Path(save_directory).is_file():
            raise ValueError(f"{OWNER}: save_directory = {save_directory} is a file; give a folder")
        self._check_parts()
        super().save_pretrained(save_directory, is_main_process=is_main_process, **given)
        if is_main_process:
            write_code(Path(save_directory))

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModelForCausalLM") -> None:
        """Every folder names our classes already, so that only subclasses have code of their own to be saved."""
        if cls is LongstrideForCausalLM:
            return
        if cls.config_class.model_type == LongstrideConfig.model_type:
            raise ValueError(
                f"{cls.__name__}: folders with model_type = {LongstrideConfig.model_type!r} load as {OWNER}; set "
                f"{cls.__name__}.config_class to a subclass of LongstrideConfig with a model_type of its own"
            )
        super().register_for_auto_class(auto_class)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *others: Any, **given: Any) -> Any:
        """Reads a folder of transformers or of longstride, a run, one of a run's checkpoints, a model that comes with
        longstride ("text"), or a name on the Hub. Weights become float32.

        `given`: dtype is the precision of the activations; also fields that do not affect the weights, such as recompute,
        and those of the generation config, such as pad_token_id.
        """
        folder = find_model(Path(str(pretrained_model_name_or_path)))
        is_local = folder.is_dir()
        if is_local:
            pretrained_model_name_or_path = folder = folder / (given.pop("subfolder", None) or "")
        changes = {name: given.pop(name) for name in CHANGEABLE if name in given}
        dtype = given.pop("dtype", None) or given.pop("torch_dtype", None)
        if dtype is not None and dtype != "auto":
            changes["precision"] = _precision(dtype)
        config = given.pop("config", None)
        if config is None and is_local:
            config = find_settings(OWNER, folder)  # A checkpoint's is in its run.
        if isinstance(config, PretrainedConfig):
            content = config.to_dict()
        else:
            hub = {name: given[name] for name in HUB if name in given}
            content, _ = cls.config_class.get_config_dict(config or pretrained_model_name_or_path, **hub)
        generation = {name: given[name] for name in vars(GenerationConfig()) if name in given}
        config, given = cls.config_class.from_dict(content, return_unused_kwargs=True, **changes, **given)
        given = {name: value for name, value in given.items() if name not in generation}
        if is_local and not (folder / "generation_config.json").is_file():
            given.setdefault("generation_config", GenerationConfig())
        wants_info = given.pop("output_loading_info", False)
        try:
            model, info = super().from_pretrained(
                pretrained_model_name_or_path, *others, config=config, dtype=torch.float32, output_loading_info=True, **given
            )
        except SafetensorError as error:
            raise ValueError(f"{pretrained_model_name_or_path}: the weights cannot be read: {short_reason(error)}") from None
        model.generation_config.update(**generation)
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
            if info.get(problem):
                first = sorted(map(str, info[problem]))[0]
                raise ValueError(
                    f"{pretrained_model_name_or_path}: the weights do not fit config.json: {problem.replace('_', ' ')}, "
                    f"such as {short_repr(first)}"
                )
        return (model, info) if wants_info else model


def write_code(folder: Path) -> None:
    """Writes the module that transformers imports for trust_remote_code."""
    (folder / f"{CODE}.py").write_text(SHIM)


def add_files(folder: Path, card: Card, config: ModelConfig) -> None:
    """Makes a saved model of longstride one of transformers, too; the weights stay as they are."""
    write_page(folder, card, config)
    LongstrideConfig.from_network(config, architectures=[OWNER]).save_pretrained(folder)
    ByteTokenizer(model_max_length=config.context).save_pretrained(folder)
    write_code(folder)


def _precision(dtype: Any) -> str:
    """Returns the precision that a dtype stands for."""
    name = str(dtype).removeprefix("torch.")
    if name not in PRECISIONS:
        raise ValueError(f"{OWNER}: dtype = {dtype} is not supported; {suggest(name, PRECISIONS)}")
    return name


def _check_mask(mask: Tensor | None, batch: int, n: int, cached: bool) -> None:
    """Raises ValueError unless there is padding on the right alone, and none with a cache, which keeps every token.

    `n`: tokens, with those in the cache. The mask is not read under torch.compile: asserted on the device.
    """
    if mask is None:
        return
    if mask.shape != (batch, n):
        of_cache = ", with the tokens in the cache" if cached else ""
        raise ValueError(f"{OWNER}: attention_mask must be {[batch, n]}{of_cache}, got {list(mask.shape)}")
    text = mask.bool()
    if cached:
        fits = text.all()
        message = f"{OWNER}: attention_mask has padding, and a cache keeps every token; give rows of one length to generate"
    else:
        fits = text[:, :1].all() & (text[:, 1:] <= text[:, :-1]).all()
        message = (
            f"{OWNER}: attention_mask has padding before tokens, and a position says which byte of the data it is; give "
            "rows of one length, or pad on the right"
        )
    if torch.compiler.is_compiling():
        torch._assert_async(fits, message)
    elif not bool(fits):
        raise ValueError(message)


def _loss(logits: Tensor, labels: Tensor, items: Tensor | int | None) -> Tensor:
    """Returns the mean nats of labels 1 to n - 1."""
    if labels.shape != logits.shape[:2]:
        raise ValueError(f"{OWNER}: labels must be {list(logits.shape[:2])}, as input_ids, got {list(labels.shape)}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"{OWNER}: labels must be whole numbers, got {labels.dtype}")
    labels = labels.long()  # A uint8 has no -100 to be compared with.
    # Not on a GPU, where it would synchronize, nor under torch.compile, where it would break the graph.
    if labels.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= BYTES))]
        if wrong.numel():
            raise ValueError(f"{OWNER}: labels must be bytes, 0 to 255, or {IGNORED}, got {wrong[0].item()}")
    scored = labels[:, 1:].to(logits.device)
    total = F.cross_entropy(logits[:, :-1].transpose(1, 2), scored, ignore_index=IGNORED, reduction="sum")
    return total / ((scored != IGNORED).sum() if items is None else items)
