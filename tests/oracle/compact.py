"""A decoder that reads a text piece by piece, at positions counted among what it still remembers, in float64.

As StreamingLLM describes it (https://arxiv.org/abs/2309.17453, section 3.2): keys are stored before RoPE and turned
anew for every piece, each to its place among those that are left; the queries stand after them.
"""

import numpy as np

from tests.oracle.forward import activation, attend, frequencies, rms_norm, rotate


def read(config, w: dict, pieces, choose) -> tuple[np.ndarray, list]:
    """Reads ``pieces``, lists of tokens, and forgets after each.

    ``choose(keys, queries)`` says which of a head's turned ``keys`` [n, D] stay (sorted places), seeing the turned
    ``queries`` [G, Q, D] of the piece that belong to it. Returns the logits of all tokens [T, V], and the kept
    positions ``[layer][head]``.
    """
    L, K, N, D = (
        config.num_hidden_layers,
        config.num_key_value_heads,
        config.num_attention_heads,
        config.head_dim,
    )
    memory = [[(np.zeros((0, D)), np.zeros((0, D)), []) for _ in range(K)] for _ in range(L)]
    freqs, logits, start = frequencies(config.rope, D), [], 0
    for tokens in pieces:
        Q = len(tokens)
        hidden = w["embedding"][np.asarray(tokens)] * config.embedding_scale
        for layer in range(L):
            p = {n: a[layer] for n, a in w.items() if n not in ("embedding", "final_norm", "lm_head")}
            x = rms_norm(hidden, p["input_norm"], config.rms_norm_eps)
            q, k, v = ((x @ p[f"{n}_proj"]).reshape(Q, -1, D).transpose(1, 0, 2) for n in "qkv")
            out = []
            for head in range(K):
                keys, values, positions = memory[layer][head]
                keys, values = np.concatenate([keys, k[head]]), np.concatenate([values, v[head]])
                positions = [*positions, *range(start, start + Q)]
                n = len(keys)
                plain = layer in config.no_rope_layers
                turned = keys if plain else rotate(keys[None], np.arange(n), freqs)[0]
                own = q[head * (N // K) : (head + 1) * (N // K)]
                own = own if plain else rotate(own, np.arange(n - Q, n), freqs)
                allowed = np.arange(n)[None] <= np.arange(n - Q, n)[:, None]
                out.append(attend(own, turned[None], values[None], config.scale, allowed[None])[0])
                stay = choose(turned, own)
                memory[layer][head] = keys[stay], values[stay], [positions[i] for i in stay]
            out = np.concatenate(out).transpose(1, 0, 2).reshape(Q, -1)
            hidden = hidden + out @ p["o_proj"]
            x = rms_norm(hidden, p["mlp_norm"], config.rms_norm_eps)
            x = activation(config.hidden_act, x @ p["gate_proj"]) * (x @ p["up_proj"])
            hidden = hidden + x @ p["down_proj"]
        logits.append(rms_norm(hidden, w["final_norm"], config.rms_norm_eps) @ w["lm_head"].T)
        start += Q
    return np.concatenate(logits), [[head[2] for head in layer] for layer in memory]
