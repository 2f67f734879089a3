"""An attack that changes nothing: clients that count as Byzantine, and train as all others."""

from pl_fed.attacks import Attack


class NoAttack(Attack):
    """No attack: metrics leave out the clients that another attack would poison.

    With the seed and the share of an attack, runs without and with it are compared over the same
    benign clients.
    """
