"""``config.json`` of every family, in both styles; and what is refused."""

import pytest

from kvec_jax.errors import LoadError, UnsupportedError
from kvec_jax.models.huggingface import config_from_hf
from tests.models.files import small_config


def test_old_and_new_style_agree():
    scaling = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128)
    old = small_config("llama", torch_dtype="bfloat16", rope_scaling=scaling | {"type": "llama3"})
    new = small_config(
        "llama", dtype="bfloat16", rope_parameters=scaling | dict(rope_type="llama3", rope_theta=10000.0)
    )
    del new["rope_theta"]
    assert config_from_hf(old) == config_from_hf(new)


def test_gemma3_old_style_with_vision_and_defaults():
    text = dict(
        model_type="gemma3_text",
        hidden_size=2560,
        intermediate_size=10240,
        num_hidden_layers=34,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
        sliding_window=1024,
    )
    outer = dict(model_type="gemma3", text_config=text, vision_config={}, eos_token_id=[1, 106])
    config = config_from_hf(outer)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 4, 256)
    assert (config.rope.kind, config.rope.factor, config.rope.theta) == ("linear", 8.0, 1e6)
    assert (config.local_rope.kind, config.local_rope.theta) == ("default", 1e4)
    assert [i for i in range(34) if i not in config.local_layers] == [5, 11, 17, 23, 29]
    assert config.sliding_window == 1024
    assert config.scale == 256**-0.5
    assert config.eos_token_ids == (1, 106)
    assert config.tie_word_embeddings


def test_smollm3_layers_without_rope():
    config = config_from_hf(small_config("smollm3", num_hidden_layers=8))
    assert config.no_rope_layers == (3, 7)
    with pytest.raises(LoadError, match="no_rope_layers: expected 3 entries, got 2"):
        config_from_hf(small_config("smollm3", no_rope_layers=[1, 1]))


@pytest.mark.parametrize(
    "generation, expected", [(None, (2,)), ({"eos_token_id": [5, 6]}, (5, 6)), ({"bos_token_id": 1}, (2,))]
)
def test_end_tokens(generation, expected):
    assert config_from_hf(small_config("llama"), generation).eos_token_ids == expected
    assert config_from_hf(small_config("llama", eos_token_id=None), {}).eos_token_ids == ()


def test_head_size():
    assert config_from_hf(small_config("mistral", head_dim=None)).head_dim == 8
    assert config_from_hf(small_config("qwen3")).head_dim == 128
    assert config_from_hf(small_config("llama", head_dim=24)).head_dim == 24


def test_windows():
    assert config_from_hf(small_config("mistral", sliding_window=None)).sliding_window is None
    assert config_from_hf(small_config("mistral", sliding_window=4096)).local_layers == ()  # longer than the context
    assert config_from_hf(small_config("mistral", sliding_window=100)).local_layers == (0, 1, 2)
    assert config_from_hf(small_config("qwen2", sliding_window=100, use_sliding_window=False)).local_layers == ()
    types = ["full_attention", "sliding_attention", "full_attention"]
    config = config_from_hf(small_config("qwen3", sliding_window=100, use_sliding_window=True, layer_types=types))
    assert (config.sliding_window, config.local_layers) == (100, (1,))


def test_yarn_lengthens_the_context():
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert config_from_hf(small_config("qwen2", rope_scaling=scaling)).max_position_embeddings == 2048


def test_max_context():
    assert config_from_hf(small_config("llama"), max_context=100).max_position_embeddings == 100
    for wrong in (0, 513, "long"):
        with pytest.raises((ValueError, TypeError)):
            config_from_hf(small_config("llama"), max_context=wrong)


@pytest.mark.parametrize(
    "family, changes, message",
    [
        ("llama", {"attention_bias": True}, "attention_bias = True"),
        ("llama", {"mlp_bias": True}, "mlp_bias = True"),
        ("llama", {"hidden_act": "relu"}, "hidden_act = 'relu'"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}}, "mrope_section"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("qwen3", {"num_experts": 8}, "num_experts = 8"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gemma3_text", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
    ],
)
def test_what_is_not_done_is_refused(family, changes, message):
    with pytest.raises(UnsupportedError, match=message):
        config_from_hf(small_config(family, **changes))


def test_unknown_architecture_lists_the_known():
    with pytest.raises(UnsupportedError, match="'mamba'; known: gemma3, gemma3_text, llama, mistral, phi3, qwen2"):
        config_from_hf({"model_type": "mamba"})
    with pytest.raises(UnsupportedError, match="None; known: "):
        config_from_hf({})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_attention_heads": 5}, r"hidden_size \(32\) is not a multiple of num_attention_heads \(5\)"),
        ({"num_key_value_heads": 3}, r"multiple of num_key_value_heads \(3\), got 4"),
        ({"num_attention_heads": 0}, "wrong"),
        ({"num_attention_heads": "four"}, "wrong"),
        ({"hidden_size": -32}, "hidden_size: expected a positive integer"),
        ({"vocab_size": None}, "vocab_size"),
        ({"rope_scaling": {"type": "linear"}}, "linear RoPE settings lack factor"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "linear RoPE settings are wrong"),
        ({"rope_scaling": [1]}, "expected an object"),
    ],
)
def test_wrong_values(changes, message):
    with pytest.raises(LoadError, match=message):
        config_from_hf(small_config("llama", **changes))


def test_missing_keys():
    config = small_config("llama")
    del config["intermediate_size"]
    with pytest.raises(LoadError, match="lacks intermediate_size"):
        config_from_hf(config)
