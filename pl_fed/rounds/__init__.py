"""The parts of a communication round.

``session`` contains the parts of a federation after its setup: ``client_states`` (the clients' data
and states), ``round`` (runs the rounds) and ``evaluation``. A round uses, in this order,
``local_training`` (the clients train), ``trained_cohort`` (the results of local training),
``byzantine_clients`` (the attackers), ``uploads`` and ``server``. ``checks`` refuses parts that do
not fit together, and ``identity`` decides whether a checkpoint fits. ``adversary`` and ``storage``
are sections of the federation's settings; ``settings`` are the trainer's.
"""
