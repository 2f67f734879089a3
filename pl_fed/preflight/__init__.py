"""Preflight: facts that trials find before training, and the rules over them.

A trial runs an algorithm, its net or its aggregator on a few samples, and changes nothing of them.
Its result is a frozen record of facts (``find_...``), or an error of the user's code (``try_...``).
Rules are functions of facts and settings that set nothing, one sentence each: ``check_...`` and
``refuse_...`` raise it, ``warn_of_...`` warn with it, and ``describe_...`` and ``explain_...``
return it, or ``None``. ``Federation.setup`` alone writes facts into an algorithm and its task.
"""
