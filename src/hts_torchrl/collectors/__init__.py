"""TorchRL collectors: synchronous rounds, and the asynchronous baselines."""
