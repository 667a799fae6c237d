"""Private names of torch, CPython and glibc, by feature, each with its reason.

Doors:
    torch_private: torch itself: process groups, DDP, autograd, optimizers
    sharded_private: DTensor and FSDP2
    pipeline_private: pipeline schedules and stages
    loader_private: iterators of a DataLoader
    frames_private: local variables of a running function
"""
