"""An independent PyTorch reference of the drafter's head: plain, slow, one request at a time, in float64.

Written from the mathematics alone; it shares no code with the library. Stored values are rounded to `dtype` where the
library promises to round (weights, hidden states, base logits, corrected logits); all else is exact to float64.

    base[s,:]    = softcap(lm_head(hidden[s]) * logit_scale)
    e            = markov_w1[prev]
    vanilla: z = e
    gated:   z = sigmoid(gate_proj([hidden ; e])) * e
    rnn:     g, c, o = split3(joint_proj([state ; e ; hidden]))
             state' = sigmoid(g) * state + (1 - sigmoid(g)) * tanh(c);  z = tanh(o)
    logits[s,:]  = base[s,:] + markov_w2 @ z
    confidence_logit[s] = proj([hidden ; e]) or proj(hidden)
"""

import dataclasses

import numpy as np
import torch

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass
class Walk:
    """One greedy walk of a batch: target tokens, corrected rows over the draft vocabulary, what was chosen from."""

    tokens: np.ndarray  # [B, S]
    logits: np.ndarray  # [B, S, Vd], -inf outside the candidates
    confidence_logits: np.ndarray | None  # [B, S]
    candidates: np.ndarray | None  # [B, S, k] draft ids, best first
    valid: np.ndarray  # [B]


class ReferenceHead:
    """The head of a drafter, from NumPy weights under the checkpoint's own names."""

    def __init__(self, weights, dtype="float32", *, vocab_size=None, softcap=None, logit_scale=1.0):
        self.dtype = TORCH_DTYPES[dtype]
        self.w = {k: self.rounded(v) for k, v in weights.items() if k != "d2t"}
        self.draft_size = len(weights["lm_head.weight"])
        self.offsets = weights["d2t"] if "d2t" in weights else np.zeros(self.draft_size, np.int64)
        self.vocab_size = vocab_size or self.draft_size
        self.softcap, self.logit_scale = softcap, logit_scale
        self.kind = (
            None
            if "markov_head.markov_w1.weight" not in weights
            else "gated"
            if "markov_head.gate_proj.weight" in weights
            else "rnn"
            if "markov_head.joint_proj.weight" in weights
            else "vanilla"
        )

    def rounded(self, x):
        """Round to the storage dtype and return float64."""
        x = torch.as_tensor(np.asarray(x, np.float64)) if not torch.is_tensor(x) else x
        return x.to(self.dtype).to(torch.float64)

    def base_logits(self, hidden):
        """[B, S, H] -> [B, S, Vd]."""
        logits = self.rounded(hidden) @ self.w["lm_head.weight"].T * self.logit_scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return self.rounded(logits)

    def embed(self, prev):
        return self.w["markov_head.markov_w1.weight"][prev]

    def latent(self, state, e, hidden):
        """One step of one request: (state [r], e [r], hidden [H]) -> (state, z [r])."""
        if self.kind == "vanilla":
            return state, e
        if self.kind == "gated":
            weight, bias = self.w["markov_head.gate_proj.weight"], self.w["markov_head.gate_proj.bias"]
            return state, torch.sigmoid(weight @ torch.cat([hidden, e]) + bias) * e
        weight, bias = self.w["markov_head.joint_proj.weight"], self.w["markov_head.joint_proj.bias"]
        g, c, o = torch.split(weight @ torch.cat([state, e, hidden]) + bias, len(e))
        keep = torch.sigmoid(g)
        return keep * state + (1 - keep) * torch.tanh(c), torch.tanh(o)

    def step(self, state, base, prev, hidden):
        """Correct one base row [Vd]; columns without a target id (padding of the draft vocabulary) become -inf."""
        if self.kind is None:
            logits = base
        else:
            state, z = self.latent(state, self.embed(prev), hidden)
            logits = base + self.w["markov_head.markov_w2.weight"] @ z
        return state, self.masked(self.rounded(logits))

    def masked(self, row):
        targets = torch.arange(self.draft_size) + torch.as_tensor(self.offsets)
        return torch.where(targets < self.vocab_size, row, -torch.inf)

    def start(self):
        return torch.zeros(self.w["markov_head.markov_w2.weight"].shape[1] if self.kind else 0, dtype=torch.float64)

    def confidence(self, prev, hidden):
        """The confidence logit of one step."""
        weight = self.w["confidence_head.proj.weight"][0]
        features = torch.cat([hidden, self.embed(prev)]) if len(weight) > len(hidden) else hidden
        bias = self.w.get("confidence_head.proj.bias")
        return float(weight @ features + (0.0 if bias is None else bias[0]))

    def candidates(self, base, k):
        """Draft ids of the k largest values of one row, best first, ties by the lowest id (both zeros are equal)."""
        values = self.masked(base).tolist()
        return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]

    def greedy(self, hidden, anchors, *, topk=None, base=None):
        """Walk greedily: argmax of the (truncated) corrected row, lowest id among equals, fed back as a target id."""
        base = self.base_logits(hidden) if base is None else self.rounded(base)
        hidden = None if hidden is None else self.rounded(hidden)
        B, S = base.shape[:2]
        tokens = np.zeros((B, S), np.int64)
        logits = np.full((B, S, self.draft_size), -np.inf)
        scored = "confidence_head.proj.weight" in self.w and hidden is not None
        confidence = np.zeros((B, S)) if scored else None
        candidates = None if topk is None else np.zeros((B, S, topk), np.int64)
        for b in range(B):
            state, prev = self.start(), int(anchors[b])
            for s in range(S):
                h = None if hidden is None else hidden[b, s]
                if confidence is not None:
                    confidence[b, s] = self.confidence(prev, h)
                state, row = self.step(state, base[b, s], prev, h)
                if candidates is not None:
                    candidates[b, s] = chosen = self.candidates(base[b, s], topk)
                    outside = torch.ones(self.draft_size, dtype=torch.bool)
                    outside[chosen] = False
                    row = torch.where(outside, -torch.inf, row)
                logits[b, s] = row.numpy()
                draft = int(np.argmax(logits[b, s]))
                prev = tokens[b, s] = draft + int(self.offsets[draft])
        valid = np.asarray(np.isfinite(logits).any(-1).all(-1) & ~np.isnan(logits).any((-1, -2)))
        return Walk(tokens, logits, confidence, candidates, valid)

    def teacher_forced(self, hidden, prev_ids):
        """Corrected rows [B, S, Vd] where the previous tokens [B, S] are given."""
        base, hidden = self.base_logits(hidden), self.rounded(hidden)
        B, S = base.shape[:2]
        logits = np.zeros((B, S, self.draft_size))
        for b in range(B):
            state = self.start()
            for s in range(S):
                state, row = self.step(state, base[b, s], int(prev_ids[b, s]), hidden[b, s])
                logits[b, s] = row.numpy()
        return logits
