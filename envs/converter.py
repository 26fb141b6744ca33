"""llama.cpp's converter, and what its package lacks for models as transformers 5 writes them: in the environment of gguf.txt.

    python converter.py [--skeleton] MODEL --outfile FILE --outtype f32

--skeleton: the file has its true header and holes for values, so that llama.cpp can be asked about a model before any work.
"""

from __future__ import annotations

import sys
from typing import Any

import convert_hf_to_gguf as converter  # type: ignore[import-not-found]
import gguf
from conversion.base import ModelBase  # type: ignore[import-not-found]

plain_config, plain_class = ModelBase.load_hparams, converter.get_model_class


def config(*args: Any, **named: Any) -> dict[str, Any]:
    """A model's config with keys that the converter reads and transformers 5 does not write."""
    own: dict[str, Any] = plain_config(*args, **named)
    own.setdefault("rotary_pct", (own.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0))
    if "n_positions" in own:
        own.setdefault("n_ctx", own["n_positions"])
    if own.get("model_type") == "deepseek_v3":
        own.setdefault("scoring_func", "sigmoid")
    if own.get("model_type") == "bloom":  # no bound of its own; else its width is taken for the window
        own.setdefault("seq_length", 2048)
    if own.get("multi_query") and not own.get("new_decoder_architecture"):  # Falcon, which then ignores num_kv_heads
        own["num_kv_heads"] = 1
    return own


def model_class(*args: Any, **named: Any) -> Any:
    """The converter's class, which takes a byte-level tokenizer where tokenizer.model is absent, as its Llama does, and says
    which layers see a sliding window, as llama.cpp reads it."""
    kind = plain_class(*args, **named)
    vocabulary, parameters = kind.set_vocab, kind.set_gguf_parameters

    def set_vocab(self: Any) -> None:
        try:
            vocabulary(self)
        except (FileNotFoundError, ValueError):
            if (self.dir_model / "tokenizer.model").exists():
                raise
            self._set_vocab_gpt2()

    def set_gguf_parameters(self: Any) -> None:
        parameters(self)
        types = self.hparams.get("layer_types") or []
        if "sliding_attention" in types:
            self.gguf_writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in types])

    kind.set_vocab, kind.set_gguf_parameters = set_vocab, set_gguf_parameters
    return kind


def write_holes(self: Any, *, progress: bool = False) -> None:
    """In place of `GGUFWriter.write_tensors_to_file`: as long a file, without a value read or written."""
    self.write_ti_data_to_file()
    for file, tensors in zip(self.fout, self.tensors):
        self.write_padding(file, file.tell())
        file.truncate(file.tell() + sum(self.ggml_pad(t.nbytes, self.data_alignment) for t in tensors.values()))


if __name__ == "__main__":
    for name in ("DSPARK_MARKOV_W1", "DSPARK_MARKOV_W2", "DSPARK_CONF_PROJ"):  # its models are newer than its gguf module
        if not hasattr(gguf.MODEL_TENSOR, name):
            setattr(gguf.MODEL_TENSOR, name, None)
    ModelBase.no_mtp = True  # layers that guess further tokens are no part of the model that variants are compared with
    ModelBase.load_hparams, converter.get_model_class = staticmethod(config), model_class
    if "--skeleton" in sys.argv:
        sys.argv.remove("--skeleton")
        gguf.GGUFWriter.write_tensors_to_file = write_holes  # type: ignore[method-assign]
    converter.main()
