"""The policy: its forward pass, sampling, shared weights and export."""
