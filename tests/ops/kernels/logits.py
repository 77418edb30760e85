"""The kernels of logits compute what PyTorch does."""

import torch

from mvp_engine.ops import logit_kernels, logit_stats
from mvp_engine.ops.logit_stats import UpstreamGrads

device = "cuda" if torch.cuda.is_available() else "cpu"
g = torch.Generator().manual_seed(0)
raw = torch.randn(6, 20001, generator=g).bfloat16().to(device) * 3
labels = torch.tensor([5, 20000, -100, 0, 9999, 8192]).to(device)
label, p, entropy, uniform = torch.randn(4, 6, generator=g).to(device)
spec = logit_stats.HeadSpec(0.7, None, 0.9, torch.bfloat16)
plain = logit_stats.torch_stats(logit_stats.logits_of(raw, spec), labels, True)
for ours, theirs in zip(logit_kernels.row_stats(raw, labels, spec.factor), plain, strict=False):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
past_the_end = logit_kernels.row_stats(raw[:1], torch.tensor([20001], device=device), 1.0)[0]
assert past_the_end.isnan().all(), "a label past the vocabulary must give NaN"
label = label.masked_fill(labels < 0, 0.0)
all_terms = UpstreamGrads(label, p, entropy, uniform / 9e3)
for upstream in (UpstreamGrads(label, p), UpstreamGrads(label, p, entropy), all_terms):
    on_host = UpstreamGrads(*(None if x is None else x.cpu() for x in upstream))
    stats = (plain.log_z, plain.entropy)
    theirs = logit_stats.logit_gradient_(
        raw.cpu(), labels.cpu(), *(x.cpu() for x in stats), on_host, spec
    )
    ours = logit_kernels.to_gradient_(raw.clone(), labels, *stats, *upstream, spec.factor)
    torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-2, atol=1e-6)
raw[:, [1, 9000]] = logit_stats.EXCLUDED
plain = logit_stats.torch_stats(logit_stats.logits_of(raw, spec), labels, False)
for ours, theirs in zip(logit_kernels.row_stats(raw, labels, spec.factor)[:3], plain, strict=False):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
gradient = logit_kernels.to_gradient_(
    raw, labels, plain.log_z, plain.entropy, label, p, entropy, None, spec.factor
)
assert gradient.isfinite().all()
assert not gradient[:, [1, 9000]].any(), "excluded rows have no gradient"
