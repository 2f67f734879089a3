"""The parts of a communication round.

``session`` contains the parts of a federation after its setup: ``client_states`` (the clients' data
and states), ``round`` (runs the rounds) and ``evaluation``. A round uses, in this order,
``local_training`` (the clients train), ``trained_cohort`` (the results of local training),
``byzantine_clients`` (the attackers), ``uploads`` and ``server``. ``broken_clients`` ends a run
with too many broken clients, and ``identity`` decides whether a checkpoint fits. ``storage`` is a
section of the federation's settings; ``settings`` are the trainer's.
"""
