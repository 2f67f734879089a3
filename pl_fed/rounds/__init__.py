"""What a communication round is made of; :meth:`pl_fed.Federation.run_round` puts it together.

Before: ``checks`` (does all fit together?), ``holdings`` (what clients have), ``adversary`` (who
attacks, and how). In a round, in this order: ``sharing`` (which process trains whom),
``local_training`` (clients train), ``trained`` (what comes of it), ``uploads`` (what is sent,
forged or left out), ``server`` (it merges, and the global model moves).
"""
