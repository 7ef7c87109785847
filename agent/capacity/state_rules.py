"""The recurrent state of one layer of a state-space or linear-attention model, from the fields of its config.json."""

from __future__ import annotations

from agent.capacity.fields import Fields
from agent.capacity.geometry import StateCache, StateType
from agent.capacity.reading import Reading


def state_of(model_type: str, text: Fields, reading: Reading) -> StateCache:
    """Shapes as in vLLM 0.32's get_mamba_state_shape_from_config of each family."""
    hidden = text.need("hidden_size", "d_model", why="the state's size follows from it")
    kind = _state_type(model_type, text, reading)
    if model_type in ("jamba", "mamba", "falcon_mamba"):
        expand = text.count("mamba_expand", "expand") or 2
        inner = (text.count("intermediate_size") if model_type != "jamba" else None) or expand * hidden
        return StateCache(
            family="mamba1",
            state_dtype=kind,
            inner=inner,
            state=text.need("mamba_d_state", "state_size", why="the size of its state"),
            kernel=text.count("mamba_d_conv", "conv_kernel") or 4,
        )
    if model_type in ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"):
        return StateCache(
            family="gated-delta",
            state_dtype=kind,
            key_heads=text.need("linear_num_key_heads", why="key heads of its linear layers"),
            key_dim=text.need("linear_key_head_dim", why="key size of its linear layers"),
            heads=text.need("linear_num_value_heads", why="value heads of its linear layers"),
            head_dim=text.need("linear_value_head_dim", why="value size of its linear layers"),
            kernel=text.count("linear_conv_kernel_dim") or 4,
        )
    if model_type == "kimi_linear":
        linear = text.section("linear_attn_config") or text
        heads = linear.need("num_heads", "linear_num_heads", why="heads of its linear layers")
        dim = linear.need("linear_head_dim", "head_dim", why="head size of its linear layers")
        kernel = linear.count("short_conv_kernel_size", "linear_conv_kernel_dim") or 4
        return StateCache(
            family="kda", state_dtype=kind, heads=heads, head_dim=dim, key_heads=heads, key_dim=dim, kernel=kernel
        )
    if model_type in ("lfm2", "lfm2_moe"):
        kernel = text.count("conv_L_cache") or 3
        return StateCache(family="short-conv", state_dtype=kind, inner=text.count("conv_dim") or hidden, kernel=kernel)
    if model_type in ("minimax", "minimax_text_01"):
        heads = text.need("num_attention_heads", why="heads of its linear layers")
        dim = text.count("head_dim") or hidden // heads
        return StateCache(family="linear", state_dtype=kind, heads=heads, head_dim=dim, kernel=1)
    return _mamba2(model_type, text, hidden, kind)


def _mamba2(model_type: str, text: Fields, hidden: int, kind: StateType) -> StateCache:
    heads = text.need("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads", why="heads of its state")
    dim = text.count("mamba_head_dim", "mamba_headdim") if not isinstance(text.raw("mamba_d_head"), int) else None
    dim = dim or (text.count("mamba_d_head") if isinstance(text.raw("mamba_d_head"), int) else None)
    if dim is None and model_type == "mamba2":
        dim = text.count("head_dim")
    inner = text.count("mamba_d_ssm") or (heads * dim if dim else (text.count("mamba_expand", "expand") or 2) * hidden)
    return StateCache(
        family="mamba2",
        state_dtype=kind,
        heads=heads,
        head_dim=dim or inner // heads,
        groups=text.count("n_groups", "mamba_n_groups", "mamba_ngroups") or 1,
        inner=inner,
        state=text.need("ssm_state_size", "mamba_d_state", "state_size", why="the size of its state"),
        kernel=text.count("conv_kernel", "mamba_d_conv") or 4,
    )


def _state_type(model_type: str, text: Fields, reading: Reading) -> StateType:
    """float32 where the file or the family says so, else the model's own dtype."""
    said = text.text("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    if said is not None:
        return "float32" if said == "float32" else "model"
    if model_type in ("jamba", "mamba", "falcon_mamba", "kimi_linear", "minimax", "minimax_text_01", "nemotron_h"):
        note = (
            "recurrent state in float32, as Transformers keeps it; vLLM's mamba_ssm_cache_dtype=auto may keep it in "
            "the model's dtype"
        )
        reading.note(note)
        return "float32"
    return "model"
