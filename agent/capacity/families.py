"""Model types whose cache layout is known, and what of it their files leave out.

The rules are those of Transformers' configuration classes and of vLLM 0.32's models; a type that is not here is read by
its field names, at a lower confidence.
"""

from __future__ import annotations


def _types(names: str) -> frozenset[str]:
    return frozenset(names.split())


PLAIN = _types(
    """apertus aquila arcee baichuan bloom chatglm cohere cohere2 commandr dbrx deci deepseek dots1 ernie4_5
    ernie4_5_moe exaone exaone4 falcon gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text
    gemma4_unified glm glm4 glm4_moe glm4v gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite granitemoe
    granitemoeshared grok-1 hunyuan_v1_dense hunyuan_v1_moe internlm internlm2 internlm3 internvl_chat llama llama4
    llama4_text llava llava_next mimo minicpm minimax_m2 ministral mistral mistral3 mixtral mllama mllama_text_model
    mpt nemotron nemotron-nas olmo olmo2 olmo3 olmoe openelm opt orion persimmon phi phi3 phi3_v phimoe pixtral
    qwen2 qwen2_5_vl qwen2_5_vl_text qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_moe qwen3_vl qwen3_vl_moe
    qwen3_vl_moe_text qwen3_vl_text seed_oss smollm3 solar stablelm starcoder2 xverse"""
)
"""Keys and values for each token, full or windowed."""

LATENT = _types(
    """axk1 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_vl_v2 dots3_note glm4_moe_lite glm_moe_dsa kimi_k2
    kimi_linear pangu_ultra_moe"""
)
"""Multi-head latent attention (as vLLM's ModelArchConfigConvertorBase.is_deepseek_mla)."""

STATEFUL = _types(
    """bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba mamba2 minimax
    minimax_text_01 nemotron_h qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next zamba2"""
)
"""State-space or linear-attention layers, alone or beside attention."""

ENCODER_DECODER = _types("""bart m2m_100 marian mbart mt5 pegasus t5 whisper""")

ENCODERS = _types(
    """albert bert camembert clip clip_text_model convnext deberta deberta-v2 distilbert electra esm layoutlm
    layoutlmv3 modernbert mpnet nomic_bert roberta siglip vit xlm-roberta"""
)

KNOWN = PLAIN | LATENT | STATEFUL | ENCODER_DECODER

# Where a window stands in the file and no list of layers: which layers slide, of (layer, pattern or limit).
EVERY_LAYER_SLIDES = _types("""ministral mistral mixtral phi3 phi3_v phimoe starcoder2""")
SWITCHED_WINDOW = _types(
    """mimo qwen2 qwen2_5_vl qwen2_5_vl_text qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_moe qwen3_next qwen3_vl"""
)
"""Types with `use_sliding_window`; where it is on, layers from `max_window_layers` slide."""
FULL_EVERY = {
    "gemma3": 6,
    "gemma3_text": 6,
    "gemma3n": 5,
    "gemma3n_text": 5,
    "gemma4": 6,
    "gemma4_text": 6,
    "cohere2": 4,
    "exaone4": 4,
    "olmo3": 4,
}
"""Every n-th layer is full, the others slide; `sliding_window_pattern` in the file overrides."""
TIED_BY_DEFAULT = _types(
    """bloom cohere cohere2 ernie4_5 ernie4_5_moe falcon falcon_mamba gemma gemma2 gemma3 gemma3_text gemma3n
    gemma3n_text gemma4 gemma4_text gpt2 gpt_bigcode lfm2 lfm2_moe mamba mpt openelm opt smollm3 starcoder2 t5 whisper
    zamba2"""
)
NORMED_HEADS = _types(
    """apertus exaone4 gemma3 gemma3_text hunyuan_v1_dense hunyuan_v1_moe lfm2 lfm2_moe qwen3 qwen3_5 qwen3_5_moe
    qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_text"""
)
"""Types with a norm over each head of the queries and one over each of the keys."""
BIASED = _types("""bloom gpt2 gpt_bigcode gpt_neox gptj opt phi starcoder2""")
"""Types with biases in attention, feed-forward layers and norms."""
UNGATED_MLP = _types(
    """apertus arcee bart bloom falcon gpt2 gpt_bigcode gpt_neox gptj mpt nemotron nemotron_h opt persimmon phi
    starcoder2 whisper"""
)

# Words in field names that mean a cache which the plain formula does not count.
SPARSE = _types(
    """dbrx deepseek_v2 deepseek_v3 deepseek_v32 ernie4_5_moe glm4_moe glm_moe_dsa gpt_oss granitemoe granitemoehybrid
    grok-1 hunyuan_v1_moe jamba kimi_k2 kimi_linear lfm2_moe llama4 llama4_text minimax minimax_m2 minimax_text_01
    mixtral nemotron_h olmoe phimoe qwen2_moe qwen3_5_moe qwen3_5_moe_text qwen3_moe qwen3_next qwen3_vl_moe
    qwen3_vl_moe_text"""
)
"""Mixtures of experts: without the experts' sizes nobody can guess their weights."""

FOREIGN_WORDS = (
    "mamba",
    "ssm",
    "rwkv",
    "retnet",
    "recurrent",
    "lru_",
    "linear_attn",
    "linear_attention",
    "linear_key",
    "linear_num",
    "linear_conv",
    "conv_kernel",
    "delta",
    "kv_lora",
    "q_lora",
    "latent",
    "compress",
    "index_",
    "indexer",
    "retention",
    "hyena",
    "shared_kv",
    "kv_shared",
    "cross_layer",
    "cla_share",
    "yoco",
    "memory_",
    "hybrid",
    "swa_",
    "time_mix",
)

FULL_NAMES = _types("""attention full full_attention global global_attention nope""")
SLIDING_NAMES = _types("""local local_attention sliding sliding_attention sliding_window swa""")
CHUNKED_NAMES = frozenset({"chunked_attention", "chunked"})
STATE_NAMES = _types("""conv kda linear linear_attention mamba mamba2 recurrent short_conv""")
EMPTY_NAMES = frozenset({"mlp", "moe", "none", "no_op"})
