"""Residual add and RMSNorm after an all-reduce, in its plain form: a kernel of its own (see kernels/norm.py)."""

from __future__ import annotations

import torch


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, with_triton: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(normed, new_residual)`` of contiguous tensors [..., hidden]; weight [hidden]. float32 inside."""
    if with_triton:
        import triton

        from shotcast.kernels.norm import add_rms_norm as kernel
        from shotcast.kernels.target import INTERPRETED

        hidden = x.shape[-1]
        normed, new_residual = torch.empty_like(x), torch.empty_like(x)
        if x.numel():
            pdl = not INTERPRETED and torch.cuda.get_device_capability(x.device) >= (9, 0)
            block = min(triton.next_power_of_2(hidden), 4096)
            kernel[(x.numel() // hidden,)](
                x,
                residual,
                weight,
                normed,
                new_residual,
                eps,
                HIDDEN=hidden,
                BLOCK=block,
                PDL=pdl,
                num_warps=max(1, min(8, block // 256)),
                enable_fp_fusion=False,
                launch_pdl=pdl,
            )
        return normed, new_residual
    new_residual = (x.float() + residual.float()).to(x.dtype)
    value = new_residual.float()
    scale = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    return (value * scale * weight.float()).to(x.dtype), new_residual
