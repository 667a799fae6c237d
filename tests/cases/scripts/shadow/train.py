"""Modules of the project have names of Python's own; they are in the script's folder, which comes first."""

import os
import sys

import profile  # isort: skip
import statistics  # isort: skip

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))
import torch.distributed as dist
from leave import leave

dist.init_process_group("gloo")
leave(dist.get_rank(), name=profile.name(), middle=statistics.middle([3, 1, 2]))
dist.barrier()  # Gloo fails a rank that still connects when its peer has left
dist.destroy_process_group()
