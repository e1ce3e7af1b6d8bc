"""The vendor library, for calls without a native kernel: NCCL for GPUs, Gloo for CPUs."""
