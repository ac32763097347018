"""Settings for the whole suite."""

import os

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the network
if not torch.cuda.is_available():  # Triton reads this when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Tiny matrices on several threads mostly wait for each other. Tests of the real model set their own number.
torch.set_num_threads(1)
