"""What attention means, in float64 NumPy, one query and one head at a time: no blocks, no tiles."""

import numpy as np


def paged_attention_float64(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    k_scale: np.ndarray | None = None,
    v_scale: np.ndarray | None = None,
) -> np.ndarray:
    """One row: `q [Q, H, D]` are its last queries, `keys` and `values [seq_len, K, D]` all it has.

    `k_scale` and `v_scale` are `[K]`. Returns `[Q, H, D]` in float64.
    """
    q, keys, values = (np.asarray(array, np.float64) for array in (q, keys, values))
    num_queries, num_heads, head_size = q.shape
    seq_len, num_kv_heads = keys.shape[:2]
    scale = head_size**-0.5 if scale is None else scale
    out = np.zeros(q.shape)
    for i in range(num_queries):
        end = seq_len - num_queries + i + 1
        start = 0 if window is None else max(0, end - window)
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            k, v = keys[start:end, kv_head], values[start:end, kv_head]
            scores = scale * (k @ q[i, head])
            if k_scale is not None:
                scores = scores * float(k_scale[kv_head])
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            logits = scores if sinks is None else np.append(scores, float(sinks[head]))
            weights = np.exp(logits - logits.max())
            weights = weights[: end - start] / weights.sum()
            out[i, head] = weights @ v
            if v_scale is not None:
                out[i, head] *= float(v_scale[kv_head])
    return out
