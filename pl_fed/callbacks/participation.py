"""Personal models of clients that never took part: evaluated, but never trained."""

from pl_fed.federation import Federation


def untrained_models(federation: Federation) -> str:
    """Return a sentence on personal models that were never trained, or an empty string.

    Args:
        federation: The federation, after an evaluation.
    """
    untrained = len(federation.clients_without_training())
    if not untrained:
        return ""
    benign = int((~federation.is_byzantine).sum())
    return (
        f"{untrained} of {benign} benign clients never took part: their personal models were never"
        " trained."
    )
