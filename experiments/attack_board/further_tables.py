"""Tables of the further studies: seeds, shares of attackers, and rounds that a backdoor lasts."""

import itertools
from collections.abc import Sequence

from experiments.attack_board.results import EDGE_CASE, MODELS, NONE, REFERENCE, SHARE, Board
from experiments.experiment import Row
from experiments.papers import interval, number, table


def write_seeds(board: Board) -> str:
    """Return the worst cases with intervals, where attacks have several seeds; or nothing."""
    algorithms, attacks, defences = list_measured(board, several_seeds=True)
    if not attacks:
        return ""
    others = [attack for attack in attacks if attack != EDGE_CASE]
    rows = []
    for algorithm, defence in itertools.product(algorithms, defences):
        clean = board.sound_values(algorithm, NONE, defence)
        cells = [algorithm, defence, interval([*clean.values()])]
        for considered in (attacks, others):
            values = find_worst(board, algorithm, defence, considered)
            plain = find_worst(board, algorithm, REFERENCE, considered)
            gains = [values[seed] - plain[seed] for seed in values if seed in plain]
            cells.append(interval([*values.values()]))
            cells.append("–" if defence == REFERENCE else interval(gains, "+"))
        rows.append(cells)
    head = ["algorithm", "defence", "no attack", "worst case", "gain over a plain mean"]
    head += ["worst case without the edge case", "gain over a plain mean"]
    text = (
        "Other seeds draw other clients, attackers and first models. The worst case is that of each"
        f" seed over {', '.join(attacks)}. A gain is the mean of differences between runs with the"
        " same seed. ± is half of a 95 % interval over seeds.\n"
    )
    return "\n".join(["## How sure is it?\n", text, table(head, rows)])


def write_shares(board: Board) -> str:
    """Return the sound accuracy by the share of attackers, where several have run; or nothing."""
    if len(board.shares) < 2:
        return ""
    shares = board.shares
    first = next(share for share in shares if share != SHARE)
    algorithms, attacks, defences = list_measured(board, share=first)
    rows = []
    for algorithm, attack in itertools.product(algorithms, attacks):
        cells = [algorithm, attack]
        for defence in defences:
            values = [board.sound(algorithm, attack, defence, share) for share in shares]
            cells.append(" / ".join(map(number, values)))
        rows.append(cells)
    percents = " / ".join(f"{100 * share:g}" for share in shares)
    seeds = [{row["seed"] for row in board.rows if float(row["share"]) == s} for s in shares]
    numbers = " / ".join(str(len(seeds_of_share)) for seeds_of_share in seeds)
    text = (
        f"Sound accuracy with {percents} % attackers, means over {numbers} seeds. Defences that"
        " take the number of attackers know it.\n"
    )
    head = ["algorithm", "attack", *defences]
    return "\n".join(["## How many attackers are too many?\n", text, table(head, rows)])


def write_durations(rows: Sequence[Row]) -> str:
    """Return the rounds until a backdoor has lost half of its success, by defence; or nothing."""
    if not rows:
        return ""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        texts = []
        for model in MODELS:
            if value := row.get(f"attack/{model}_durability"):
                outlasts = float(row.get(f"attack/{model}_outlasts") or 0)
                texts.append(f"{'≥ ' if outlasts else ''}{float(value):.0f}")
            else:
                texts.append("–")
        cells.setdefault((row["attack"], row["algorithm"]), {})[row["defence"]] = " / ".join(texts)
    defences = list(dict.fromkeys(defence for line in cells.values() for defence in line))
    lines = [[*key, *(line.get(d, "–") for d in defences)] for key, line in cells.items()]
    text = (
        "Rounds from the last attack until the trigger's success is half of what it was: global /"
        " personal models. ≥: not until the end of the run. –: there is no such model, or the"
        " trigger had no success.\n"
    )
    head = ["attack", "algorithm", *defences]
    return "\n".join(["## How long do backdoors last?\n", text, table(head, lines)])


def list_measured(
    board: Board, share: float = SHARE, several_seeds: bool = False
) -> tuple[list[str], list[str], list[str]]:
    """Return the algorithms, attacks and defences with results, or with several seeds."""
    least = 2 if several_seeds else 1
    cells = [
        cell
        for cell in itertools.product(board.algorithms, board.attacks, board.defences)
        if len(board.sound_values(*cell, share=share)) >= least
    ]
    algorithms, attacks, defences = (
        [name for name in names if any(cell[place] == name for cell in cells)]
        for place, names in enumerate((board.algorithms, board.attacks, board.defences))
    )
    return algorithms, attacks, defences


def find_worst(
    board: Board, algorithm: str, defence: str, attacks: Sequence[str]
) -> dict[str, float]:
    """Return the least sound accuracy over attacks by seed, for seeds that have all attacks."""
    numbers = [board.sound_values(algorithm, attack, defence) for attack in attacks]
    common = [seed for seed in numbers[0] if all(seed in part for part in numbers)]
    return {seed: min(part[seed] for part in numbers) for seed in common}
