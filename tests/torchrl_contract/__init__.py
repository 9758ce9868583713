"""What TorchRL says of every collector, said of ours."""
