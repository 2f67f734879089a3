"""Preflight: facts that trials find before training, and the rules over them.

A trial runs an algorithm, its net or its aggregator on a few samples, and changes nothing of them.
Its result is a frozen record of facts (``find_...``), or an error of the user's code (``try_...``).
Rules (``check_...``, ``refuse_...``, ``describe_...``) are functions of facts and settings that set
nothing, one sentence each. ``Federation.setup`` alone writes facts into an algorithm and its task.
"""
