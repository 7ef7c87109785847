"""The planner and the advisor as a form: what fits, with sliders to see what if."""

from __future__ import annotations

import streamlit as st

from agent.wire.plan import PlanChoices
from dashboard import plan_words, widgets
from dashboard.conditions import Condition
from dashboard.context import Context, ask, plain, show_condition
from dashboard.local_page import goes_without_token
from dashboard.operator_token import ask_token, change
from dashboard.plan_words import (
    ENGINES,
    LENGTHS,
    MAX_CONFIG_BYTES,
    OTHER_GPU,
    OWN,
    SEQUENCES,
    TENSOR_PARALLEL,
    Form,
    NotAConfig,
)
from dashboard.source import SLOW_REFRESH_SECONDS, timed

PRESET, UPLOAD = "a known model", "a config.json"
DEFAULT_PRESET, DEFAULT_GPU = "llama-3.1-8b", "A100-80GB"


def show_planner(context: Context) -> None:
    """Advice for the chosen pool, refreshed; and the form, which is drawn anew by itself when it changes."""
    if context.pool is not None:
        st.fragment(_advice, run_every=context.every(SLOW_REFRESH_SECONDS))(context, context.pool)
    st.html(widgets.heading_html("Planner", "what a model keeps in memory, what fits, what to change"))
    listing, choices = ask(context.client.engines), ask(context.client.plan_choices)
    if listing is None or choices is None:
        return
    needs_token = not goes_without_token(listing.agent, context.client)
    if not needs_token or ask_token(context, "memory"):
        st.fragment(_planner)(context, choices, needs_token)


def _advice(context: Context, pool: str) -> None:
    with timed("advice"):
        found = ask(lambda: context.client.advice(pool))
        if found is not None:
            st.html(plan_words.live_html(found))


def _planner(context: Context, choices: PlanChoices, needs_token: bool) -> None:
    with timed("planner"):
        left, right = st.columns([1, 2.2], gap="medium")
        with left:
            try:
                form = _form(choices, context.agent)
            except NotAConfig as error:
                st.error(plain(str(error)))
                return
        if form is None:
            return
        with right:
            found = change(context.client, lambda writer: writer.plan(form.to_json()), needs_token=needs_token)
            if isinstance(found, Condition):
                show_condition(found)
                return
            st.html(plan_words.plan_html(found, context.theme))
        st.html(plan_words.advice_html(found))


def _form(choices: PlanChoices, agent: int) -> Form | None:
    """None while no model is chosen. Raises NotAConfig.

    The file is of one agent: it is sent without a click, so that it must not go to another that is looked at later.
    """
    source = st.segmented_control("Model", [PRESET, UPLOAD], default=PRESET, key="plan_source", required=True)
    preset, config, model = None, None, None
    if source == UPLOAD:
        file = st.file_uploader(
            "The model's config.json", type="json", key=f"plan_config_{agent}", max_upload_size=MAX_CONFIG_BYTES >> 20
        )
        if file is None:
            st.html(widgets.note_html("Choose the file: it stays on the dashboard's server for this session."))
            return None
        config, model = plan_words.read_config(file.getvalue()), file.name.removesuffix(".json")
    else:
        preset = st.selectbox("Known model", choices.presets, _at(choices.presets, DEFAULT_PRESET), key="plan_preset")
    names = [*(card.name for card in choices.gpus if card.memory_bytes is not None), OTHER_GPU]
    card = st.selectbox("GPU", names, _at(names, DEFAULT_GPU), key="plan_gpu")
    gib = st.number_input("Its memory, GiB", 1.0, 4096.0, 24.0, key="plan_gib") if card == OTHER_GPU else None
    tp = st.select_slider("Tensor-parallel GPUs", TENSOR_PARALLEL, key="plan_tp")
    kv = st.selectbox("KV dtype", choices.kv_dtypes, key="plan_kv")
    weights = st.selectbox("Weights", choices.weight_dtypes, key="plan_weights")
    block = st.select_slider("Tokens in a block", plan_words.BLOCK_SIZES, value=16, key="plan_block")
    length = st.select_slider("Longest sequence, tokens", LENGTHS, key="plan_length")
    sequences = st.select_slider("Such sequences at once", SEQUENCES, key="plan_seqs")
    return Form(
        preset=preset,
        config=config,
        model=model,
        gpu=None if card == OTHER_GPU else card,
        gpu_memory_gib=gib,
        tp=int(tp),
        kv_dtype=kv or "auto",
        weight_dtype=weights or "auto",
        block_size=int(block),
        max_model_len=None if length == OWN else int(length),
        max_num_seqs=None if sequences == ENGINES else int(sequences),
        utilization=st.slider("Share of the GPU for the engine", 0.5, 0.99, 0.9, 0.01, key="plan_share"),
        headroom=st.slider("Headroom, share of the blocks", 0.0, 0.5, 0.0, 0.01, key="plan_headroom"),
        co_tenant_gib=st.slider("Held by other processes, GiB", 0.0, 80.0, 0.0, 0.5, key="plan_others"),
    )


def _at(names: list[str], wanted: str) -> int:
    return names.index(wanted) if wanted in names else 0
