"""The vendor library, which serves what no own kernel serves: NCCL for GPUs, Gloo for CPUs."""
