"""Small random models of many architectures that transformers has, with the tests' tokenizer: what people may bring."""

import warnings
from pathlib import Path
from typing import Any

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, WINDOW = 512, 64, 2, 4, 2, 1024

DENSE: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "max_position_embeddings": WINDOW,
}  # fmt: skip
WIDE: dict[str, Any] = DENSE | {"head_dim": 16}  # classes whose own width of a head is not hidden / heads
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 32, "v_head_dim": 16,
    "num_key_value_heads": HEADS, "head_dim": 32,
}  # fmt: skip
GPT: dict[str, Any] = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": WINDOW}
LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"],  # as llama.cpp takes for granted
}  # fmt: skip

# {name: (class of its config, what is not this class's default)}; the name says what is particular about it
ZOO: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", DENSE),
    "mistral": ("MistralConfig", WIDE | {"sliding_window": None}),
    "mistral-window": ("MistralConfig", WIDE | {"sliding_window": 64}),
    "qwen2": ("Qwen2Config", DENSE),
    "qwen3": ("Qwen3Config", WIDE),
    "smollm3": ("SmolLM3Config", DENSE),
    "granite": ("GraniteConfig", DENSE | {"logits_scaling": 3.0, "residual_multiplier": 0.5}),
    "olmo2": ("Olmo2Config", DENSE),
    "stablelm": ("StableLmConfig", DENSE),
    "ernie4_5": ("Ernie4_5Config", WIDE),
    "nemotron": ("NemotronConfig", WIDE | {"num_attention_heads": 2, "head_dim": 32}),  # half of a head turns
    "cohere": ("CohereConfig", DENSE | {"logit_scale": 0.25}),
    "cohere2": ("Cohere2Config", WIDE | {"sliding_window": 64}),
    "starcoder2": ("Starcoder2Config", DENSE | {"sliding_window": 64}),
    "exaone4": ("Exaone4Config", DENSE | {"sliding_window": 64, "sliding_window_pattern": 2}),
    "glm4": ("Glm4Config", WIDE),
    "phi3": ("Phi3Config", DENSE | {"original_max_position_embeddings": WINDOW}),
    "phi": ("PhiConfig", DENSE | {"num_attention_heads": 2}),
    "gemma2": ("Gemma2Config", WIDE | {"query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0, "sliding_window": 64}),
    "gemma3_text": ("Gemma3TextConfig", WIDE | {"query_pre_attn_scalar": 16, "sliding_window": 64}),
    "gpt2": ("GPT2Config", GPT),
    "gptj": ("GPTJConfig", GPT | {"rotary_dim": 8}),
    "gpt_neox": ("GPTNeoXConfig", DENSE),
    "opt": ("OPTConfig", DENSE | {"ffn_dim": 128, "word_embed_proj_dim": WIDTH}),
    "bloom": ("BloomConfig", {"hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS}),
    "falcon": ("FalconConfig", DENSE),
    "mpt": ("MptConfig", {"d_model": WIDTH, "n_heads": HEADS, "n_layers": LAYERS, "max_seq_len": WINDOW, "expansion_ratio": 2}),
    "mamba": ("MambaConfig", {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "state_size": 8}),
    "falcon_mamba": ("FalconMambaConfig", {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "state_size": 8}),
    "lfm2": ("Lfm2Config", DENSE | {"layer_types": ["conv", "full_attention"], "block_multiple_of": 64}),
    "qwen3_next": ("Qwen3NextConfig", WIDE | EXPERTS | LINEAR | {"shared_expert_intermediate_size": 64}),
    "minimax": ("MiniMaxConfig", WIDE | {"num_local_experts": 4, "layer_types": ["linear_attention", "full_attention"]}),
    "mixtral": ("MixtralConfig", DENSE | {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", WIDE | EXPERTS | {"norm_topk_prob": True}),
    "deepseek_v3": (
        "DeepseekV3Config",
        DENSE | LATENT | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 1,
                          "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
    ),
    "gpt_oss": ("GptOssConfig", WIDE | {"head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64}),
    "llama4_text": ("Llama4TextConfig", WIDE | {"num_hidden_layers": 4, "intermediate_size_mlp": 128, "num_local_experts": 4}),
    "gemma3": (
        "Gemma3Config",
        {
            "text_config": WIDE | {"vocab_size": VOCAB, "sliding_window": 64, "max_position_embeddings": 256,
                                   "query_pre_attn_scalar": 16},
            "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
                              "image_size": 32, "patch_size": 16},
            "mm_tokens_per_image": 4, "image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7,
        },
    ),
}  # fmt: skip


def config(name: str, vocab: int = VOCAB, **other: Any) -> Any:
    """The config of a model of the zoo. other: settings beside those of the zoo."""
    import transformers

    kind, settings = ZOO[name]
    if "text_config" in settings:
        settings = settings | {"text_config": settings["text_config"] | {"vocab_size": vocab}}
    common = {"vocab_size": vocab, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "initializer_range": 0.2}
    made = getattr(transformers, kind)(**common | settings | other)
    made.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(made)].__name__]
    return made


def make(name: str, folder: Path, *, seed: int = 0, dtype: str = "bfloat16", tokenizer: Path | None = None, **other: Any) -> Path:
    """Write a model of the zoo. tokenizer: a model folder whose own it gets; other: settings beside those of the zoo."""
    import torch
    import transformers
    from conftest import make_tokenizer

    spoken = make_tokenizer() if tokenizer is None else transformers.AutoTokenizer.from_pretrained(tokenizer)
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config(name, len(spoken), **other))
        with torch.no_grad():
            for parameter in model.parameters():  # wide enough that predictions differ between tokens, and none is constant
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.2)
        model.to(getattr(torch, dtype)).save_pretrained(folder)
        spoken.save_pretrained(folder)
    return folder
