"""The rooms of a communication round.

``session`` is a federation that is set up: ``client_states`` (the clients' data and states),
``round`` (runs the rounds) and ``evaluation``. A round uses, in this order, ``local_training``
(clients train; ``work_share`` says in which process), ``trained_cohort`` (their results),
``byzantine_clients`` (attackers), ``uploads`` and ``server``. ``checks`` refuses parts that do not
fit together, and ``identity`` says which checkpoints fit. ``adversary`` and ``storage`` are
sections of the federation's settings; ``settings`` are the trainer's.
"""
