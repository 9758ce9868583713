"""Targets and losses as pure functions of tensors, on TorchRL's functionals.

Shapes: N environments, T steps of a round; B samples. Times are subscripts: ``reward_t`` is what
the action at ``t`` brought, ``value_t`` the value of the observation that it was chosen on.
"""
